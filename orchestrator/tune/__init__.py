"""Hyperparameter search on Ray Tune. Each trial is a separate run, which the ordinary controller drives."""

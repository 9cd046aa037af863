"""Hyperparameter search on Ray Tune: each trial is a run of its own, driven by the same controller."""

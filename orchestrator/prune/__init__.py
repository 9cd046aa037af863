"""Pruning in training: which weights are set to zero, and at which step."""

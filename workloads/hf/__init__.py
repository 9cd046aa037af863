"""Hugging Face: checkpoints and configurations in both directions, and classes of transformers that run unchanged.

From the bottom up: `tables`, `files`, `as_they_are`, `convert`, `check`, `export`.
"""

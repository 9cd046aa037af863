"""Hugging Face: checkpoints and configurations converted in both directions, classes of transformers run as they are,
and checks that both compute the same.
"""

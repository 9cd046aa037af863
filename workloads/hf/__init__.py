"""Hugging Face: folders read and written, configurations converted, classes of transformers run as they are, and proofs
that both compute the same.

Imports model and objectives.
"""

"""Hugging Face: one table per class, read in both directions."""

"""Answers that the model generates while it learns from rewards for them."""

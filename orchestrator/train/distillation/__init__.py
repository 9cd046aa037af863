"""Distillation: a frozen teacher on the same ranks, or its stored logits, from which the trained model learns."""

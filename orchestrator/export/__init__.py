"""Commits to the formats of others and back: Hugging Face folders with their tokenizer, DeepSpeed checkpoints.

Imports resolve, data, checkpoint, storage and job.
"""

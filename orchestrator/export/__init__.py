"""Conversion of commits to other formats, and from them: Hugging Face folders with tokenizer, DeepSpeed checkpoints.

Imports resolve, data, checkpoint, storage and job.
"""

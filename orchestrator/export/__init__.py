"""Conversion of commits to other formats: Hugging Face folders with tokenizer and model card, PEFT adapters, own
models, DCP, and the forms of extensions (`kinds`).
"""

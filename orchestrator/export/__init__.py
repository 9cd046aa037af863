"""Conversion of commits to other formats, and from them: Hugging Face folders with tokenizer and model card, adapters
of PEFT, folders of own models, checkpoints of DeepSpeed and Megatron-LM.

Pickles of other projects are read in a process of their own.
"""

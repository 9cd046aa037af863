"""Importers: the weights in checkpoints of DeepSpeed and Megatron-LM, as a folder in the Hugging Face format. A
separate process reads their pickles.
"""

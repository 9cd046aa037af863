"""The weights in checkpoints of DeepSpeed and Megatron-LM, as a folder in the Hugging Face format.

What they have pickled is read in a process of its own.
"""

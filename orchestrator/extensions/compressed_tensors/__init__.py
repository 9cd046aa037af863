"""Export for transformers with linear layers rounded to int8 or int4, in the form of compressed-tensors."""

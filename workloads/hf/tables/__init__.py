"""How our configurations, names and tensors correspond to those of transformers' classes, a table for each class."""

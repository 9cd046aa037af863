"""Classes of transformers that train unchanged."""

"""Our models from and to Hugging Face folders, by the tables."""

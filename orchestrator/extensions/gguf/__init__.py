"""Export as one GGUF file for llama.cpp."""

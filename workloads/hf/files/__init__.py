"""What a Hugging Face folder holds: config.json, weights in any form that is read, tokens and settings."""

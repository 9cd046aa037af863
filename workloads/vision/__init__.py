"""Image models: a vision transformer, CLIP and masked autoencoders. They run as own models."""

"""Models of images: a vision transformer, and what is trained with it. They are run as own models are."""

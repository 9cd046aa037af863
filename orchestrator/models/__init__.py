"""The weights that a run begins with, continues from, averages or learns from, and how ranks read them."""

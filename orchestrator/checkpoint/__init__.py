"""Commits: layout-free, published last, verified, resharded on load, saved beside training."""

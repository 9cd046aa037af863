"""Checks that an exported or unchanged class computes what is expected of it."""

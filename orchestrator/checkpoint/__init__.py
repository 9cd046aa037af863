"""Commits: layout-free, published last, verified, resharded on load, saved beside training; snapshots in peers' memory.

Imports job and storage. What goes into a commit is told by train; which commit to load is chosen by control.
"""

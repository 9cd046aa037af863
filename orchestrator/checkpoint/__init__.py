"""Commits (checkpoints): independent of the layout, written asynchronously, published atomically, verified, and
resharded on load; and snapshots, the same in the memory of other nodes.

`store` reads and writes commits, `saver` saves beside training, `retention` removes old ones.
"""

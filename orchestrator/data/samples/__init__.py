"""Samples: from token streams to batches, by index arithmetic (`batches`).

`windows` locates a sample, `order` says which one is next, `receipt` records which were used. Samples that are held
out for validation are excluded.
"""

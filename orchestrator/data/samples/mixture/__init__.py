"""Mixtures: how many samples of each source come when, as arithmetic on positions.

`interleave` says which source a position belongs to, `shares` how often each source comes, `mixed_order` which of its
samples comes, `passes` how often a run reads each.
"""

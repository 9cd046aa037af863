"""Mixtures: which source a sample comes from, as arithmetic on positions.

`interleave` assigns positions to sources, `shares` computes the weights of sources, `mixed_order` chooses the sample
of a source, `passes` counts how often a run reads each source.
"""

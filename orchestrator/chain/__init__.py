"""Chains: several runs of one job file; each may start from the result of an earlier one.

This package decides which stages are ready, what they begin with, and whether that has changed. Each run is driven like
any other.
"""

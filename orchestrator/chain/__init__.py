"""Chains: several runs of one job file, each of which may begin with the result of an earlier one.

This package decides which stages are ready, what they begin with, and whether that has changed. Each run is driven like
any other.
"""

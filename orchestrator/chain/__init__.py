"""Chains: several runs of one job file, each of which may begin with what an earlier one has made.

Which stages are ready, what they begin with and whether that has changed; the runs themselves are driven as any other.
"""

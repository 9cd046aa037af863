"""Raw text to token shards with Ray Data, and from there to batches by pure index arithmetic.

Imports job and storage, and of workloads only the contract that an objective has with its samples.
"""

"""Data: raw text to token shards as tasks of Ray (`prepare`), and token shards to batches by index arithmetic
(`batches`).

Imports job and storage, and of workloads only the contract that an objective has with its samples.
"""

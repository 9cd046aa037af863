"""Data: raw text to token shards with Ray Data (`prepare`), and token shards to batches by index arithmetic
(`batches`).

Imports job and storage, and of workloads only the contract that an objective has with its samples.
"""

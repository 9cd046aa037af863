"""Data: raw text to token shards as tasks of Ray (`prepare`), and token shards to batches by index arithmetic
(`batches`).

It knows no models: of workloads it needs what an objective has to do with its samples.
"""

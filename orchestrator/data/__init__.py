"""Data: raw text (`sources`, `clean`, `encoding`) to token shards by Ray tasks (`prepare`), the prepared data
(`store`), and token shards to batches by index arithmetic (`samples`). `images` are samples of a different kind.

This package knows no models. From workloads it needs only what an objective does with its samples.
"""

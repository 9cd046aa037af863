"""Preprocessing: raw text to token shards, as tasks of Ray (`prepare`). `records` makes records of rows for objectives
that read such, `shards` writes one part, `part_tasks` spreads the parts over a cluster.
"""

"""Preprocessing: raw text to token shards, as Ray tasks (`prepare`).

`records` makes the records of objectives that read rows, `shards` writes one part, `part_tasks` spreads the parts
over a cluster.
"""

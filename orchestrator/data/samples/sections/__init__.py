"""Sections of prepared data. An epoch goes through them in order, so training can begin with the first section while
the others are prepared (`data.streaming`), and reads only a few shards at a time.
"""

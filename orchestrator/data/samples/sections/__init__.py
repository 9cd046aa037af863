"""Sections of prepared data: an epoch goes through them one after the other, so that training may begin with the first
while the others are prepared (`data.streaming`), and reads only few shards at a time.
"""

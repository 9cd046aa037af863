"""Prepared data: its manifest, its files on a disk or a store (`data_folder`), and its token streams (`tokens`), read
from verified shards, from copies on a node, or in blocks.
"""

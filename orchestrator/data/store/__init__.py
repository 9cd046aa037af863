"""Prepared data: its manifest, its files on a disk or a store (`data_folder`), and its tokens as streams (`tokens`),
read from verified shards, from copies on a node or in blocks.
"""

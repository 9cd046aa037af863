"""Samples: streams of tokens to batches, by index arithmetic (`batches`). `windows` says where a sample lies, `order`
which is next, `receipt` which were used; what is held out for validation is none of them.
"""

"""The kinds of parallelism: data, ZeRO, tensor, pipeline, expert and context; `parallelize` applies them in order.

Parameters are plain local tensors; `parameter_shard` maps them to canonical names and global offsets.
"""

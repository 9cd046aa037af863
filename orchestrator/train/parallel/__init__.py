"""The kinds of parallelism and how they are combined: data, ZeRO, tensor, pipeline, expert and context.

`parallelize` applies them in one order. Plain local tensors; the maps to canonical names are in `parameter_shard`.
"""

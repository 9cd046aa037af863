"""Traces of a rank: the engine's own step, run on tensors without memory as any rank of any world.

A trace records what the rank computes, sends and holds. Torch's FakeTensorMode replaces memory, and its "fake" process
group replaces the other ranks; a dispatch mode records. The process must not be in a process group. Commands that plan
and check a job use traces. A run's controller obtains them from a separate process (`background_tracer`). No rank
imports this package.
"""

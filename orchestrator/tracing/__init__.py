"""The engine's own step run as any rank of any world on tensors without memory: what it computes, sends and holds.

Torch's FakeTensorMode and its "fake" process group stand in for memory and for the other ranks; a dispatch mode
records. Imports train and what is below it; the process must not be in a process group. Nothing of a run imports it.
"""

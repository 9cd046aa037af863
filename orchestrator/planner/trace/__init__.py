"""The engine's own step run as any rank of any world on tensors without memory: what it computes, sends and holds.

Torch's FakeTensorMode and its "fake" process group stand in for memory and for the other ranks; a dispatch mode
records. The process must not be in a process group. The commands that plan and check a job use it, and a run's
controller asks it in a process beside itself, `beside`; no rank imports it.
"""

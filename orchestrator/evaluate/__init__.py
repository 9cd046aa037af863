"""How good the model of a commit is: so far, what it says after prompts.

It is given a workload and a `read(name)` that returns a tensor of a commit, and changes nothing of a run.
"""

"""How good the model of a commit is: its metrics on held-out text, and what it says after prompts.

It is given a commit, or a `read(name)` that returns a tensor of one, and changes nothing of a run.
"""

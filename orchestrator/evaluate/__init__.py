"""The quality of a commit's model: its metrics on held-out text, and its text after prompts.

The input is a commit, or a `read(name)` that returns its tensors. A run is not changed.
"""

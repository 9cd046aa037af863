"""Names in a run directory, and of the folder of such, that several packages must agree on. They are on users' disks
and never change."""

from __future__ import annotations

COMMITS = "checkpoints"
"""The folder of commits, one folder each."""
MANIFEST = "manifest.json"
"""In a commit's folder: what the commit holds. With it the commit exists."""
EVALUATION = "evaluation.json"
"""In a commit's folder: the row of its evaluation, if that was made beside the run."""
ATTEMPT_FILE = "ATTEMPT"
"""Beside the commits: the number of the attempt that alone may publish more."""
CHAIN = "chain.json"
"""In the directory of a chain of stages, each of which has a run directory in it: how far it has come."""
RUNS = "runs"
"""The folder of runs that are called by their names."""

"""File names in a run directory, and in a folder of runs, that several packages share. They are on users' disks and
must never change.
"""

from __future__ import annotations

COMMITS = "checkpoints"
"""The folder of commits, with one folder for each."""
MANIFEST = "manifest.json"
"""In a commit's folder: what the commit holds. The commit exists once this file does."""
EVALUATION = "evaluation.json"
"""In a commit's folder: the row of its evaluation, if an extra worker made it."""
ATTEMPT_FILE = "ATTEMPT"
"""Beside the commits: the number of the only attempt that may still publish."""
CHAIN = "chain.json"
"""In the directory of a chain, which contains a run directory for each stage: its progress."""
RUNS = "runs"
"""The folder of runs that are addressed by name."""

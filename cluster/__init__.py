"""Run processes on machines: gangs of ranks, local clusters, and clusters over SSH.

This package knows nothing of jobs, models or checkpoints, and imports neither of the other packages. Each of its
subpackages imports only those below it; `tests/unit/test_house.py` checks their order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os.path import basename, dirname

WORKER = "default_worker.py"
"""The name of the program of Ray's workers."""


def job_folders_last(path: Sequence[str], program: str) -> list[str]:
    """Return Python's path for a process of `program`. In a worker of Ray the job's folders are moved to the end.

    Ray puts them first, and a working directory once more into PYTHONPATH. There a user's file would hide a module of
    Python or a package with the same name.
    """
    folder = dirname(program)
    if basename(program) != WORKER or folder not in path:
        return list(path)
    first, others = path[: path.index(folder)], path[path.index(folder) :]
    ours = [each for each in first if not each.startswith(dirname(dirname(folder)))]
    return [*(each for each in [*first, *others] if each not in ours), *ours]


sys.path[:] = job_folders_last(sys.path, sys.argv[0] if sys.argv else "")

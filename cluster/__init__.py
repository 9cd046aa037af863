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
    """Return `sys.path` for `program`. In a Ray worker the job's folders move to the end.

    Ray puts them first, where a user's file would shadow a standard module or a package.
    """
    folder = dirname(program)
    if basename(program) != WORKER or folder not in path:
        return list(path)
    first, others = path[: path.index(folder)], path[path.index(folder) :]
    ours = [each for each in first if not each.startswith(dirname(dirname(folder)))]
    return [*(each for each in [*first, *others] if each not in ours), *ours]


sys.path[:] = job_folders_last(sys.path, sys.argv[0] if sys.argv else "")

"""Where a run is executed. Knows nothing of jobs, models or checkpoints; imports neither of the other packages.

Each package within imports only those below it; `tests/unit/test_house.py` has their order and holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os.path import basename, dirname

WORKER = "default_worker.py"
"""The program that a worker of Ray is."""


def job_folders_last(path: Sequence[str], program: str) -> list[str]:
    """Python's path in a process of `program`; in a worker of Ray with the folders of the job behind all others.

    Ray puts them first, where a file of the user's hides a module of Python, or a package, of the same name.
    """
    folder = dirname(program)
    if basename(program) != WORKER or folder not in path:
        return list(path)
    first, others = path[: path.index(folder)], path[path.index(folder) :]
    ours = [each for each in first if not each.startswith(dirname(dirname(folder)))]
    return [*(each for each in first if each not in ours), *others, *ours]


sys.path[:] = job_folders_last(sys.path, sys.argv[0] if sys.argv else "")

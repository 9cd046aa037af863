"""Starting this project's own programs, whatever a working directory holds.

Python looks into the working directory first, where a user may have a `cluster`, `workloads` or `orchestrator` of their
own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that holds this package."""
PACKAGES = ("cluster", "workloads", "orchestrator")
"""The names of this project that a folder of a user's may have too."""
_RUN = (
    "import sys, importlib; sys.argv = sys.argv[1:]; sys.path.insert(0, {root!r}); "
    "importlib.import_module('orchestrator'); main = importlib.import_module(sys.argv[0]).main; "
    "sys.path.remove({root!r}); main()"
)


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that calls `main` of a module of this project in a process of its own."""
    return [sys.executable, "-c", _RUN.format(root=str(ROOT)), module, *arguments]


def environment_of_ranks() -> dict[str, str]:
    """The environment of a process that imports what this one can, in which ranks begin."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there are GPUs must not touch them before a fork
    }


def hidden_packages(path: Iterable[str]) -> list[str]:
    """Which files and folders in these folders Python may take for packages of this project: of an editable install,
    which is looked for last, also a folder that is no package."""
    folders = {Path(folder or ".").resolve() for folder in path} - {ROOT.resolve()}
    places = [
        folder / f"{name}{end}" for folder in sorted(folders) for name in PACKAGES for end in ("", ".py")
    ]
    there = (place for place in places if place.is_dir() or (place.suffix and place.is_file()))
    return [str(place) for place in there if not (place / "workers" / "gang.py").is_file()]


def keeper() -> Callable[[], None]:
    """A function that makes the packages of these names those of this program, in another process that looks elsewhere
    first. It can be sent by value; on a machine where this program lies elsewhere it is found as Python finds it."""
    root = str(ROOT)

    def keep_packages() -> None:
        import sys
        from importlib import import_module

        sys.path.insert(0, root)
        try:
            import_module("orchestrator")
        finally:
            sys.path.remove(root)

    return keep_packages

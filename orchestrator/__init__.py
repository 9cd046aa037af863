"""How a model is trained, from job file to exported model: `from orchestrator import Job, plan, run, submit, load_run`.

Each package within imports only those below it; `tests/unit/test_house.py` has their order and holds it. What this
module offers is imported when it is used, so that a rank pays nothing for it.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import dirname, isfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api.checkpoint import Checkpoint, load_checkpoint
    from orchestrator.api.job import Job
    from orchestrator.api.plan import JobPlan, plan
    from orchestrator.api.run import Run, RunFailed, load_run
    from orchestrator.api.start import run, submit
    from orchestrator.config.errors import InputError

__all__ = [
    "Checkpoint",
    "InputError",
    "Job",
    "JobPlan",
    "Run",
    "RunFailed",
    "load_checkpoint",
    "load_run",
    "plan",
    "run",
    "submit",
]


def _keep_packages() -> None:
    """Make `cluster` and `workloads` those beside this package, although a folder of the user's may have such a name
    and come first on Python's path. What the user has imported by that name keeps all that it has."""
    for name in ("cluster", "workloads"):
        ours = f"{dirname(dirname(__file__))}/{name}"
        before = sys.modules.get(name)
        if not isfile(
            f"{ours}/__init__.py"
        ):  # packages that were sent to a cluster each have a folder of their own
            continue
        if before is None:
            spec = spec_from_file_location(name, f"{ours}/__init__.py", submodule_search_locations=[ours])
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
        elif ours not in (path := list(getattr(before, "__path__", ()))):
            before.__path__ = [ours, *path]


_keep_packages()


def __getattr__(name: str) -> Any:
    """What the project offers in Python, imported now."""
    from importlib import import_module

    places = {
        "Checkpoint": "api.checkpoint",
        "InputError": "config.errors",
        "Job": "api.job",
        "JobPlan": "api.plan",
        "load_checkpoint": "api.checkpoint",
        "plan": "api.plan",
        "run": "api.start",
        "submit": "api.start",
    }
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"orchestrator.{places.get(name, 'api.run')}"), name)

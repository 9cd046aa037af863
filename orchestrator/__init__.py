"""How a model is trained, from job file to exported model: `from orchestrator import Job, run, submit, load_run`.

From the bottom up: job, storage, planning, checkpoint, data, resolve, train, track, export, control, launch,
tune, verify, api, cli. A package imports only those below it; `tests/unit/test_house.py` holds that. What this module
offers is imported when it is used, so that a rank pays nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api.job import Job
    from orchestrator.api.run import Run, RunFailed, load_run
    from orchestrator.api.start import run, submit
    from orchestrator.job.errors import InputError

__all__ = ["InputError", "Job", "Run", "RunFailed", "load_run", "run", "submit"]


def __getattr__(name: str) -> Any:
    """What the project offers in Python, imported now."""
    from importlib import import_module

    places = {"InputError": "job.errors", "Job": "api.job", "run": "api.start", "submit": "api.start"}
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"orchestrator.{places.get(name, 'api.run')}"), name)

"""Free space that a run needs before it begins: for one commit at least."""

from __future__ import annotations

import os
import shutil

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.host_memory import FORCED, state_bytes
from orchestrator.storage.uri import is_local, local_path


def check_space(spec: JobSpec, shape: ModelShape, uri: str) -> None:
    """Raise InputError if the disk of a local run directory has no room for a commit. The folder need not be there."""
    if not is_local(uri) or not spec.resources.must_fit:
        return
    folder = local_path(uri)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free, needed = shutil.disk_usage(folder).free, state_bytes(spec, shape, least=True)
    if free < needed:
        what = (
            f"a commit of this run takes {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free"
        )
        raise InputError(what, f"--run-dir {uri}", f"free some, or give another folder; {FORCED}")

"""Free space that a run needs before it begins: for one commit at least."""

from __future__ import annotations

import os
import shutil

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec
from orchestrator.planning.host_memory import AVERAGE, FORCED
from orchestrator.planning.layout import ModelShape
from orchestrator.planning.simulation.update import KEPT, kept_numbers
from orchestrator.storage.uri import is_local, local_path


def commit_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """The bytes of a commit within 1 %: weights, what the optimiser keeps and a moving average, all fp32. An optimiser
    of one's own is taken for one that keeps nothing."""
    name = str(spec.train.optimizer.name)
    kept = 4.0 * kept_numbers(name, shape) if name in KEPT else 0.0
    each = 4.0 + kept + (AVERAGE if spec.checkpoint.ema is not None else 0.0)
    return each * shape.parameters * shape.trained_share


def check_space(spec: JobSpec, shape: ModelShape, uri: str) -> None:
    """Raise InputError if the disk of a local run directory has no room for a commit. The folder need not be there."""
    if not is_local(uri) or not spec.resources.must_fit:
        return
    folder = local_path(uri)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free, needed = shutil.disk_usage(folder).free, commit_bytes(spec, shape)
    if free < needed:
        what = (
            f"a commit of this run takes {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free"
        )
        raise InputError(what, f"--run-dir {uri}", f"free some, or give another folder; {FORCED}")

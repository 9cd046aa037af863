"""What a run on this machine begins before Ray is there: the imports of its ranks, and the check of its model in a
process that has them."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from typing import cast

from cluster.workers.shared_imports import CallInCopy, SharedImports, is_supported
from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec
from orchestrator.launch.preflight import check_preparable, preflight
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import ENTRY_OF


@contextlib.contextmanager
def imports_begun(spec: JobSpec, embedded: bool) -> Iterator[str]:
    """The name of a process in which the imports of ranks begin now, while the job is checked and Ray starts; it ends
    with this. Empty if the ranks are not to run on this machine."""
    if not (embedded and is_supported()):
        yield ""
        return
    engine = "torch" if spec.parallel == "auto" else spec.parallel.engine or "torch"
    imports = SharedImports(secrets.token_hex(16), ENTRY_OF[engine])
    try:
        yield imports.name
    finally:
        imports.close()


@contextlib.contextmanager
def checked(
    spec: JobSpec, run_dir: RunDir, until: int | None, address: str | None, shared: str
) -> Iterator[Callable[[], JobSpec]]:
    """What returns the job as `preflight` does, or raises its InputError.

    All of it is checked now, unless there is a process with the imports (`shared`): then what loads no model is, and
    the rest there while Ray starts, since importing torch twice takes longer than all else.
    """
    asked = spec, run_dir, until, address
    task = _begun(*asked, shared) if shared else None
    if task is None:
        found = preflight(*asked).spec
        yield lambda: found
        return

    @functools.cache
    def job() -> JobSpec:
        try:
            return cast("JobSpec", task.result())
        except ChildProcessError:
            return preflight(*asked).spec

    try:
        yield job
    finally:
        task.cancel()


def preflighted(spec: JobSpec, run_dir: str, until: int | None, address: str | None) -> JobSpec:
    """The job of `preflight` alone, which another process is sent sooner than all that it stands for."""
    return preflight(spec, RunDir(run_dir), until, address).spec


def _begun(
    spec: JobSpec, run_dir: RunDir, until: int | None, address: str | None, shared: str
) -> CallInCopy | None:
    """The check at work in another process; None if what takes no model is wrong, or the process is not there."""
    try:
        check_preparable(spec)
        return CallInCopy(shared, preflighted, spec, run_dir.uri, until, address)
    except (InputError, OSError):
        return None

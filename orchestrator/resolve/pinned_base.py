"""The weights that a run begins with, where they are those of another run's commit: that run may be at work and remove
it, so it is held there until it is not needed any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.checkpoint.identity import BASE
from orchestrator.checkpoint.pins import hold_if_allowed, holders, release
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.checkpoint.store import Store
from orchestrator.config.spec import JobSpec
from orchestrator.resolve.base import Base, base_of, check_drawn, named_base
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest

T = TypeVar("T")


def bases_of(
    spec: JobSpec, begun: Mapping[str, Any], commit: CommitManifest | None, run: RunDir
) -> tuple[Base | None, Base | None]:
    """See `base_of`, of the run that is to begin at `run`; and the weights that are read at the next start, none where
    it goes on from a `commit` that has all. If they are of a commit, that is held. Raises as `base_of_commit`."""
    check_drawn(spec, commit)
    begun = begun or (commit.meta.get(BASE) if commit else None) or {}
    if commit is not None and not spec.needs_base:
        return base_of(spec, begun, True), None

    def hold(base: Base | None) -> Base | None:
        if base is not None and base.step is not None:
            hold_if_allowed(_store(base), base.step, _holder(run))
        return base

    base = read_base(spec, begun, commit is not None, hold)
    return base, base


def read_base(spec: JobSpec, begun: Mapping[str, Any], settled: bool, read: Callable[[Base | None], T]) -> T:
    """What `read` returns of what `base_of` does. Where the newest commit of a run is meant, and a run at work has
    removed it meanwhile, that is the next one. Raises as `base_of` and `read_chosen`."""
    base = base_of(spec, begun, settled)
    if base is None or base.step is None:
        return read(base)

    def choose(*_: object) -> int:
        found = base_of(spec, begun, settled)
        assert found is not None
        assert found.step is not None
        return found.step

    return read_chosen(_store(base), None, lambda step: read(named_base(spec, step)), choose)


def not_held(base: Base | None, run: RunDir) -> list[str]:
    """A line if the commit that the run at `run` needs cannot be held."""
    if base is None or base.step is None or _holder(run) in holders(_store(base), base.step):
        return []
    where = f"{base.uri}@{base.step}"
    return [f"{where} is needed and cannot be held, since nothing may be written there: see that it is kept"]


def release_base(spec: JobSpec, run: RunDir, begun: Mapping[str, Any]) -> None:
    """Let go of the commit that a run which is done has `begun` with, unless it is needed for good."""
    if not spec.needs_base and begun.get("step") is not None:
        base = Base(**begun)
        assert base.step is not None
        with contextlib.suppress(OSError):
            release(_store(base), base.step, _holder(run))


def _store(base: Base) -> Store:
    return Store(RunDir(base.uri).commits)


def _holder(run: RunDir) -> str:
    return f"the run {run.uri}"

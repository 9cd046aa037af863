"""Check that a directory holds the search that is to be continued there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import check_same_sets, differences, is_other, read_job, shown
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.storage.run_directory import RunDir

SAME = ("space", "metric", "window", "sampler", "scheduler", "grace", "reduction", "interval")
"""Keys of `tune` that must not change when a search is continued; trials, limits and layouts may."""


def check_same_sweep(spec: JobSpec, sweep: RunDir) -> None:
    """Raise InputError if the directory holds a run, or a search that differs from this one. It names every key.

    A search differs by its job, by the keys SAME of `tune`, or by how its values are measured.
    """
    before = read_job(sweep)
    if before is None:
        return
    assert spec.tune is not None
    hint = "set it back, or give another name or --run-dir"
    if before.tune is None or sweep.exists("events.jsonl"):
        hint = f"give the search a folder of its own: --run-dir {shlex.quote(f'{sweep.uri}-search')}"
        raise InputError("this is a run, not a search", sweep.uri, hint)
    problems = Problems()
    ours, theirs = (each.model_dump(mode="json", include=set(SAME)) for each in (spec.tune, before.tune))
    ours["mode"], theirs["mode"] = list(spec.tune.directions), list(before.tune.directions)
    for key in ours:
        if is_other(theirs[key], ours[key]):
            with problems.noted():
                raise InputError(f"tune.{key} is not what this search began with", sweep.uri, hint)
    for key, was, now in (
        *differences(spec.identity(), before.identity()),
        *_measured_otherwise(
            measure_of(before.evaluate, before.checkpoint.averaged),
            measure_of(spec.evaluate, spec.checkpoint.averaged),
        ),
    ):
        with problems.noted():
            problem = f"{key} is {shown(was)} in this search and {shown(now)} in the job file"
            raise InputError(problem, sweep.uri, hint)
    with problems.noted():
        check_same_sets(spec.set_sources, before.set_sources)
    problems.raise_noted()


def _measured_otherwise(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which two jobs measure evaluations differently, each with the value before and now.

    These keys are not part of a run's identity, see `measure_of`.
    """
    for key, name in (("evaluate.batches", "batches"), ("checkpoint.average.last", "averaged")):
        if is_other(was[name], now[name]):
            yield key, was[name], now[name]

"""Hashes of the user's own code, which is part of a run's identity, or of its data's where it cleans text."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.spec import JobSpec
from orchestrator.data.clean.config import Own
from orchestrator.parallel.config import cost_of
from workloads.errors import WorkloadError
from workloads.own.object_reference import code_hash, is_built_in, is_object_reference, load, root_of, sources


def used_by(spec: JobSpec) -> list[str]:
    """Every `module:name` of a job that planning, training and evaluation run, each once; that of a cleaning step is
    part of the data instead. What this program has itself is none."""
    optimizer, named = spec.train.optimizer, [spec.workload.model, spec.workload.objective]
    if spec.data.samples is not None:
        named.append(spec.data.samples.use)
    own = (optimizer.name, optimizer.schedule, cost_of(spec.parallel))
    named += [each.use for each in own if isinstance(each, ObjectReference)]
    named += list(spec.evaluate.metrics or ()) if spec.evaluate else []
    named += [reward.own for reward in spec.rewards if reward.own]
    return list(dict.fromkeys(name for name in named if is_object_reference(name) and not is_built_in(name)))


def code_of(spec: JobSpec) -> dict[str, str]:
    """The hash of the user's own code by `module:name`, empty if the job names none. Raises InputError."""
    found = {}
    for name in used_by(spec):
        try:
            found[name] = code_hash(name)
        except WorkloadError as error:
            raise InputError(str(error), where_of(spec, name)) from None
    return found


def roots_of(spec: JobSpec) -> list[str]:
    """The folders in which the job's own code is, each once. Raises WorkloadError."""
    return list(dict.fromkeys(str(root_of(name)) for name in used_by(spec)))


def find_code(spec: JobSpec, expected: dict[str, str], roots: Iterable[str]) -> None:
    """Find the job's own code in this process, in `roots` too where they are. Raises InputError if it is not what is
    `expected`, since this node has another working directory."""
    sys.path += [root for root in roots if root not in sys.path]
    if expected and code_of(spec) != expected:
        what = "the user's own code on this node is not that of the run"
        raise InputError(what, ", ".join(expected), "put it back, or let all nodes have the same")


def where_of(spec: JobSpec, name: str) -> str:
    """The key of the job file that names own code."""
    optimizer = spec.train.optimizer
    for key, given in (
        ("workload.model", spec.workload.model),
        ("workload.objective", spec.workload.objective),
        ("data.samples", spec.data.samples and spec.data.samples.use),
        ("train.optimizer.name", str(optimizer.name)),
        ("train.optimizer.schedule", str(optimizer.schedule)),
        ("parallel.cost", str(cost_of(spec.parallel))),
    ):
        if given == name:
            return key
    rewards = [number for number, reward in enumerate(spec.rewards) if reward.own == name]
    return f"rewards.{rewards[0]}.own" if rewards else "evaluate.metrics"


def check_same_code(spec: JobSpec, before: dict[str, str], where: str) -> None:
    """Raise InputError if the job's own code is not that `before`, and the job does not accept that it has changed."""
    now = code_of(spec) if before else {}
    for name, known in before.items():
        changed = name in now and now[name] != known
        if changed and now[name] not in spec.accept_code:
            raise InputError(
                f"the code of {name} is not that which the run began with",
                where,
                f"put it back; or accept it by accept_code: [{now[name]}], which the run records; or begin another run",
            )


def cleaning_function(rule: Own) -> Callable[..., Any]:
    """The function that a step of cleaning names. Raises InputError."""
    where = f"data.clean.own {rule.function}"
    try:
        found: Any = load(rule.function)
    except WorkloadError as error:
        raise InputError(str(error), where) from None
    if not callable(found):
        hint = "mend it; it must be importable where the data is made"
        raise InputError("is no function", where, hint)
    called: Callable[..., Any] = found
    return called


def cleaning_code(rule: Own) -> str:
    """A hash of the module that has the function of a step of cleaning, and of those that it imports from the same
    folder. Raises InputError."""
    function = cleaning_function(rule)
    try:
        found = _hash(Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_text())
    except (OSError, TypeError, ValueError):
        raise InputError(
            "has no source code", f"data.clean.own {rule.function}", "write it in Python"
        ) from None
    try:
        alone = len(sources(rule.function)) == 1
        return found if alone else _hash([found, code_hash(rule.function)])
    except WorkloadError:  # a module of which nothing more can be followed
        return found


def check_same_cleaning(spec: JobSpec, before: dict[str, str], where: str, mend: str = "") -> None:
    """Raise InputError if the job's own steps of cleaning are not those that cleaned the run's text `before`, and the
    job does not accept that the text stays as those left it; `mend` is told instead where it cannot."""
    rules = [step.options for step in spec.data.clean or ()] if before else []
    for rule in rules:
        if not isinstance(rule, Own) or rule.function not in before:
            continue
        now = cleaning_code(rule)
        if now == before[rule.function] or (now in spec.accept_code and not mend):
            continue
        accept = f"go on with the text as it was cleaned by accept_code: [{now}]; or begin another run"
        what = f"the code of {rule.function} is not that which cleaned the run's text"
        raise InputError(what, where, f"put it back; or {mend or accept}")


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())

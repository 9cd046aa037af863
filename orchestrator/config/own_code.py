"""Hashes of the user's own code, which is part of a run's identity, or of its data's where it cleans text."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.clean.config import CleanStep, Own
from workloads.errors import WorkloadError
from workloads.own.object_reference import code_hash, load, root_of, sources


def code_of(own_code: Mapping[str, str]) -> dict[str, str]:
    """The hash of the user's own code by `module:name`, empty without any. Raises InputError.

    `own_code` is that of `JobSpec.own_code`.
    """
    result = {}
    for name, where in own_code.items():
        try:
            result[name] = code_hash(name)
        except WorkloadError as error:
            raise InputError(str(error), where) from None
    return result


def roots_of(own_code: Mapping[str, str]) -> list[str]:
    """The folders in which the job's own code is, each once. Raises WorkloadError."""
    return list(dict.fromkeys(str(root_of(name)) for name in own_code))


def find_code(own_code: Mapping[str, str], expected: dict[str, str], roots: Iterable[str]) -> None:
    """Find the job's own code in this process, in `roots` too where they are. Raises InputError if it is not what is
    `expected`, since this node has another working directory."""
    sys.path += [root for root in roots if root not in sys.path]
    if expected and code_of(own_code) != expected:
        problem = "the user's own code on this node differs from the run's"
        raise InputError(problem, ", ".join(expected), "put it back, or let all nodes have the same")


def check_same_code(
    own_code: Mapping[str, str], accepted: Sequence[str], before: dict[str, str], where: str
) -> None:
    """Raise InputError if the job's own code is not that `before`, and the job does not accept that it has changed.

    Args:
        own_code: the user's own code, see `JobSpec.own_code`.
        accepted: hashes of changed code that the job accepts.
        before: the hashes with which the run began.
        where: names the run in messages.
    """
    now = code_of(own_code) if before else {}
    for name, known in before.items():
        changed = name in now and now[name] != known
        if changed and now[name] not in accepted:
            raise InputError(
                f"the code of {name} has changed since the run began",
                where,
                f"put it back; or accept it by accept_code: [{now[name]}], which the run records; or begin another run",
            )


def cleaning_function(rule: Own) -> Callable[..., Any]:
    """The function that a step of cleaning names. Raises InputError."""
    where = f"data.clean.own {rule.function}"
    try:
        function: Any = load(rule.function)
    except WorkloadError as error:
        raise InputError(str(error), where) from None
    if not callable(function):
        hint = "fix it; it must be importable where the data is made"
        raise InputError("is not a function", where, hint)
    called: Callable[..., Any] = function
    return called


def cleaning_code(rule: Own) -> str:
    """A hash of the module that has the function of a step of cleaning, and of those that it imports from the same
    folder. Raises InputError."""
    function = cleaning_function(rule)
    try:
        result = _hash(Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_text())
    except (OSError, TypeError, ValueError):
        raise InputError(
            "has no source code", f"data.clean.own {rule.function}", "write it in Python"
        ) from None
    try:
        alone = len(sources(rule.function)) == 1
        return result if alone else _hash([result, code_hash(rule.function)])
    except WorkloadError:  # a module whose imports cannot be followed further
        return result


def check_same_cleaning(
    steps: Sequence[CleanStep] | None,
    accepted: Sequence[str],
    before: dict[str, str],
    where: str,
    mend: str = "",
) -> None:
    """Raise InputError if the job's own steps of cleaning are not those that cleaned the run's text `before`, and the
    job does not accept that the text stays as those left it; If that is impossible, the error's hint is `mend`."""
    for rule in _own_rules(steps) if before else ():
        if rule.function not in before:
            continue
        now = cleaning_code(rule)
        if now == before[rule.function] or (now in accepted and not mend):
            continue
        accept = f"continue with the text as it was cleaned by accept_code: [{now}]; or begin another run"
        problem = f"the code of {rule.function} has changed since it cleaned the run's text"
        raise InputError(problem, where, f"put it back; or {mend or accept}")


def cleaning_functions(steps: Sequence[CleanStep] | None) -> list[str]:
    """The functions of the user's own that clean the text, as `module:name`."""
    return [rule.function for rule in _own_rules(steps)]


def _own_rules(steps: Sequence[CleanStep] | None) -> list[Own]:
    return [step.options for step in steps or () if isinstance(step.options, Own)]


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())

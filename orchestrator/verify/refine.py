"""Refine the profile of this machine's CPUs by a finished run."""

from __future__ import annotations

import datetime
import getpass
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.workers.machine import this_machine
from orchestrator.config.errors import InputError
from orchestrator.observe.audit import measured_parts
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import predict
from orchestrator.planner.demand import Demand
from orchestrator.planner.device_profile import Change, Profile, Refinement, read
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir

ONCE = 1.25
"""The largest factor by which one run may change a figure."""
TOGETHER = 2.0
"""The largest factor by which all runs together may change a calibrated figure."""
SLOWS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "compute": (
        ("peak.fp32", -1),
        ("peak.bf16", -1),
        ("peak.fp16", -1),
        ("memory_bandwidth.value", -1),
        ("launch.value", 1),
        ("narrow.launch", 1),
    ),
    "optimizer": (("optimizer_share.value", -1),),
    "communication": (
        ("collective.value", 1),
        ("waking.value", 1),
        ("message.value", 1),
        ("inside.latency", 1),
        ("inside.bandwidth", -1),
    ),
    "delay": (("delay.value", 1),),
}
"""The profile's figures that predict each part of a step and a rank's delay, and whether a larger figure makes the part
slower (1) or faster (-1).
"""


def refined(
    profile: Profile,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    record: Mapping[str, Any],
) -> Profile:
    """Return the profile after a run with these measured seconds for each predicted part.

    Each figure moves by the square root of measured / predicted, limited by ONCE and TOGETHER. Under `delay`, both
    mappings have a rank's relative delay. `record` holds the time, the user, the run and its number of steps.
    """
    ratios = {
        part: measured[part] / predicted[part]
        for part in SLOWS
        if predicted.get(part, 0.0) > 0.0 and measured.get(part, 0.0) > 0.0
    }
    document, changes = profile.model_dump(mode="json"), []
    bandwidth = profile.memory_bandwidth.value
    for part, ratio in ratios.items():
        factor = _moved(ratio)
        if part == "optimizer":  # its share refers to a bandwidth that has already moved
            factor /= bandwidth / _value(document, "memory_bandwidth.value")
        for key, sign in SLOWS[part]:
            if document[key.partition(".")[0]] is None:
                continue
            before = _value(document, key)
            after = _bounded(profile, key, before, before * factor**sign)
            if after != before:
                _set(document, key, after)
                changes.append(Change(figure=key, before=before, after=after))
    entry = Refinement(**record, ratios=ratios, changes=tuple(changes))
    return Profile.model_validate({**document, "refined": [*document["refined"], entry.model_dump()]})


def undone(profile: Profile) -> Profile:
    """Return the profile as it was before the last refinement.

    Raises ValueError if no run has refined it, InputError if its record is damaged.
    """
    if not profile.refined:
        raise ValueError("no run has refined it")
    result = profile.model_copy(update={"refined": profile.refined[:-1]})
    document = profile.model_dump(mode="json")
    for change in profile.refined[-1].changes:
        try:
            _set(document, change.figure, change.before)
            result = Profile.model_validate({**document, "refined": document["refined"][:-1]})
        except (KeyError, TypeError, ValidationError):
            problem = f"says that {change.figure} was {change.before:g}, which it cannot have been"
            raise InputError(
                problem, "the last record of a run", "orchestrator calibrate measures again"
            ) from None
    return result


def _moved(ratio: float) -> float:
    return min(max(math.sqrt(ratio), 1.0 / ONCE), ONCE)


def _bounded(profile: Profile, key: str, before: float, after: float) -> float:
    """Limit `after` to within TOGETHER of the calibrated figure. A share grows at most to 1."""
    calibrated = next(
        (c.before for entry in profile.refined for c in entry.changes if c.figure == key), before
    )
    upper = min(calibrated * TOGETHER, max(calibrated, 1.0)) if "share" in key else calibrated * TOGETHER
    return min(max(after, calibrated / TOGETHER), upper)


def _value(document: Mapping[str, Any], key: str) -> float:
    result: Any = document
    for name in key.split("."):
        result = result[name]
    return float(result)


def _set(document: dict[str, Any], key: str, value: float) -> None:
    *path, last = key.split(".")
    target: Any = document
    for name in path:
        target = target[name]
    target[last] = value


FEWEST = 20
"""The minimum number of steps of a run that refines a profile."""
MOST = 10_000
"""A rank's delay is computed from about this many steps at most."""
CALIBRATE = "run orchestrator calibrate first"


def refine(demand: Demand, shape_of: Callable[[], ModelShape], run: RunDir, path: Path) -> Profile:
    """Return a profile that is refined by a finished run.

    Args:
        demand: what the run's job asks of the planner.
        shape_of: returns the model's sizes, which may read its folder.
        run: the run directory.
        path: the file of the profile.

    Raises:
        InputError: the run cannot refine the profile.
    """
    profile = _profile(path)
    summary, plan = run.read_json_or_empty("summary.json"), run.read_json_or_empty("plan.json")
    means, chosen = summary.get("step_parts") or {}, dict(plan.get("chosen") or {})
    if not means or not chosen:
        raise InputError("has not measured the parts of a step", run.uri, "name a run that has ended")
    if demand.on_gpu:
        raise InputError("ran on GPUs, but this profile is for CPUs", run.uri, "name a CPU run")
    _check_machine(summary.get("machine") or {}, run)
    refined_runs = {entry.run for entry in profile.refined}
    if run.uri in refined_runs:
        raise InputError("has refined this profile already", run.uri, "undo that with --undo")
    if len(summary.get("layouts") or ()) > 1:
        raise InputError("ran under several layouts", run.uri, "name a run under one")
    if (steps := int(summary.get("step") or 0)) < FEWEST:
        raise InputError(
            f"has {steps} steps; refinement needs at least {FEWEST}", run.uri, "name a longer run"
        )
    layout = Layout.from_json({key: value for key, value in chosen.items() if key != "text"})
    machine = profile.machine(demand.precision).scaled(demand.resources.per_worker.cpu)
    time = predict(demand, shape_of(), layout, machine).time
    late = summary.get("late_seconds")
    measured, predicted = measured_parts(means, late), {**time.to_json(), "delay": profile.delay.value}
    if late is None:  # rank 0's communication time then includes waiting for the last rank
        predicted["communication"] += time.stragglers
    measured["delay"] = delay_of(line.row for line in run.log(METRICS).backward() if line.row is not None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = {"time": now, "by": _who(), "run": run.uri, "steps": steps}
    return refined(profile, predicted, measured, record)


def _who() -> str:
    """Return the user's name, or the user id if there is no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def delay_of(newest_first: Iterable[Row]) -> float:
    """Return rank 0's mean delay over its shortest computation, as a share of it; 0 for too few steps.

    It covers the steps of the newest gang except the first. The shortest computation is the 5 % quantile, because a
    single step may be an outlier.
    """
    attempt, delays = None, list[float]()
    for row in newest_first:
        attempt = attempt or row.get("attempt")
        if row.get("attempt") != attempt or len(delays) > MOST:
            break
        delays.append(sum(row.get(f"{part}_seconds", 0.0) for part in ("forward", "backward", "optimizer")))
    computing = sorted(delays[:-1])
    if len(computing) < FEWEST - 1 or computing[0] <= 0.0:
        return 0.0
    return statistics.fmean(computing) / computing[len(computing) // 20] - 1.0


def undo(path: Path) -> Profile:
    """Return the profile in the file `path` as it was before the last refinement. Raises InputError."""
    try:
        return undone(_profile(path))
    except ValueError as error:
        raise InputError(str(error), str(path), "there is nothing to undo") from None


def _check_machine(ran_on: Mapping[str, Any], run: RunDir) -> None:
    """Raise InputError for a run of another kind of machine."""
    machine, kind = this_machine(), ("processor", "cores")
    if not all(ran_on.get(key) for key in kind):
        raise InputError("does not say on which machine it ran", run.uri, "name a run of this version")
    if any(ran_on[key] != machine[key] for key in kind):
        theirs, mine = (f"{of['cores']} x {of['processor']}" for of in (ran_on, machine))
        hint = "refine the profile on that machine"
        raise InputError(f"ran on {theirs}, but this machine has {mine}", run.uri, hint)


def _profile(path: Path) -> Profile:
    if not path.is_file():
        raise InputError("this machine has no profile yet", str(path), CALIBRATE)
    profile = read(path)
    if profile.kind != "cpu":
        raise InputError("is not a profile for CPUs", str(path), CALIBRATE)
    return profile

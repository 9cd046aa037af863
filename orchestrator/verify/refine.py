"""The profile of this machine's processors refined by a run that has ended."""

from __future__ import annotations

import datetime
import getpass
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.workers.machine import this_machine
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.observe.audit import measured_parts
from orchestrator.parallel.layout import Layout
from orchestrator.planner.choose_layout import predict
from orchestrator.planner.profile import Change, Profile, Refinement, read
from orchestrator.resolve.resolved_job import resolve
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir

ONCE = 1.25
"""How many times larger or smaller one run may make a figure."""
TOGETHER = 2.0
"""And all runs together, of what was measured by calibration."""
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
"""By part of a step, and by the delay of a rank, the figures that it is predicted by, and whether it takes longer with
more (1) or less (-1) of each."""


def refined(
    profile: Profile,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    record: Mapping[str, Any],
) -> Profile:
    """The profile after a run of which these seconds by part were measured, where it predicts those, and under `delay`
    the share by which a rank's seconds are beyond its least; `record` says when, by whom, of which run and how many
    steps."""
    ratios = {
        part: measured[part] / predicted[part]
        for part in SLOWS
        if predicted.get(part, 0.0) > 0.0 and measured.get(part, 0.0) > 0.0
    }
    document, changes = profile.model_dump(mode="json"), []
    bandwidth = profile.memory_bandwidth.value
    for part, ratio in ratios.items():
        factor = _moved(ratio)
        if part == "optimizer":  # whose share is of a bandwidth that has moved already
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
    """The profile as it was before the last run that has refined it. Raises ValueError if none has, InputError if its
    record is damaged."""
    if not profile.refined:
        raise ValueError("no run has refined it")
    found = profile.model_copy(update={"refined": profile.refined[:-1]})
    document = profile.model_dump(mode="json")
    for change in profile.refined[-1].changes:
        try:
            _set(document, change.figure, change.before)
            found = Profile.model_validate({**document, "refined": document["refined"][:-1]})
        except (KeyError, TypeError, ValidationError):
            what = f"says that {change.figure} was {change.before:g}, which it cannot have been"
            raise InputError(
                what, "the last record of a run", "orchestrator calibrate measures anew"
            ) from None
    return found


def _moved(ratio: float) -> float:
    return min(max(math.sqrt(ratio), 1.0 / ONCE), ONCE)


def _bounded(profile: Profile, key: str, before: float, after: float) -> float:
    """`after`, within TOGETHER of what the figure was before any run; a share grows to 1 at most."""
    begun = next((c.before for entry in profile.refined for c in entry.changes if c.figure == key), before)
    most = min(begun * TOGETHER, max(begun, 1.0)) if "share" in key else begun * TOGETHER
    return min(max(after, begun / TOGETHER), most)


def _value(document: Mapping[str, Any], key: str) -> float:
    found: Any = document
    for name in key.split("."):
        found = found[name]
    return float(found)


def _set(document: dict[str, Any], key: str, value: float) -> None:
    *path, last = key.split(".")
    found: Any = document
    for name in path:
        found = found[name]
    found[last] = value


FEWEST = 20
"""Steps of a run that say something."""
MOST = 10_000
"""Steps of which the delay of a rank is read off."""
CALIBRATE = "run orchestrator calibrate first"


def refine(spec: JobSpec, run: RunDir, path: Path) -> Profile:
    """The profile in the file `path` after this run, which is to have ended. Raises InputError."""
    profile = _profile(path)
    summary, plan = run.read_json_or_empty("summary.json"), run.read_json_or_empty("plan.json")
    means, chosen = summary.get("step_parts") or {}, dict(plan.get("chosen") or {})
    if not means or not chosen:
        raise InputError("has not measured the parts of a step", run.uri, "name a run that has ended")
    if spec.resources.per_worker.gpu:
        raise InputError("ran on GPUs, and the profile is of processors", run.uri, "name a run on processors")
    _check_machine(summary.get("machine") or {}, run)
    known = {entry.run for entry in profile.refined}
    if run.uri in known:
        raise InputError("has refined this profile already", run.uri, "undo that with --undo")
    if len(summary.get("layouts") or ()) > 1:
        raise InputError("ran under several layouts", run.uri, "name a run under one")
    if (steps := int(summary.get("step") or 0)) < FEWEST:
        raise InputError(f"has {steps} steps, and {FEWEST} say something", run.uri, "name a longer run")
    layout = Layout.from_json({key: value for key, value in chosen.items() if key != "text"})
    machine = profile.machine(spec.train.dtype).scaled(spec.resources.per_worker.cpu)
    time = predict(spec, resolve(spec).shape, layout, machine).time
    late = summary.get("late_seconds")
    measured, predicted = measured_parts(means, late), {**time.to_json(), "delay": profile.delay.value}
    if late is None:  # waiting for the last rank is among what rank 0 has measured of communication
        predicted["communication"] += time.stragglers
    measured["delay"] = delay_of(line.row for line in run.log(METRICS).backward() if line.row is not None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = {"time": now, "by": _who(), "run": run.uri, "steps": steps}
    return refined(profile, predicted, measured, record)


def _who() -> str:
    """The name of the user; of one without a name, as in a container, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def delay_of(newest_first: Iterable[Row]) -> float:
    """By how much rank 0 has computed longer than its least in the mean of the newest gang's steps but the first, as a
    share of that; 0 of too few steps. The least is the twentieth part that is shortest: a single one may be odd."""
    attempt, found = None, list[float]()
    for row in newest_first:
        attempt = attempt or row.get("attempt")
        if row.get("attempt") != attempt or len(found) > MOST:
            break
        found.append(sum(row.get(f"{part}_seconds", 0.0) for part in ("forward", "backward", "optimizer")))
    own = sorted(found[:-1])
    if len(own) < FEWEST - 1 or own[0] <= 0.0:
        return 0.0
    return statistics.fmean(own) / own[len(own) // 20] - 1.0


def undo(path: Path) -> Profile:
    """The profile in the file `path` as it was before the last run that has refined it. Raises InputError."""
    try:
        return undone(_profile(path))
    except ValueError as error:
        raise InputError(str(error), str(path), "there is nothing to undo") from None


def _check_machine(ran_on: Mapping[str, Any], run: RunDir) -> None:
    """Refuse a run of another kind of machine; of another machine of the same kind it says as much."""
    here, kind = this_machine(), ("processor", "cores")
    if not all(ran_on.get(key) for key in kind):
        raise InputError("does not say on which machine it ran", run.uri, "name a run of this version")
    if any(ran_on[key] != here[key] for key in kind):
        there, mine = (f"{of['cores']} x {of['processor']}" for of in (ran_on, here))
        hint = "refine the profile on that machine"
        raise InputError(f"ran on {there}, and this machine has {mine}", run.uri, hint)


def _profile(path: Path) -> Profile:
    if not path.is_file():
        raise InputError("this machine has no profile yet", str(path), CALIBRATE)
    profile = read(path)
    if profile.kind != "cpu":
        raise InputError("is no profile of processors", str(path), CALIBRATE)
    return profile

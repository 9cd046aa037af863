"""The profile of this machine's processors refined by a run that has ended."""

from __future__ import annotations

import datetime
import getpass
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.workers.machine import this_machine
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.observe.audit import measured_parts
from orchestrator.parallel.layout import Layout
from orchestrator.planner.plan import predict
from orchestrator.planner.profile import Profile, read
from orchestrator.planner.refinement import refined, undone
from orchestrator.resolve.resolved_job import resolve
from orchestrator.storage.row_line import METRICS, Row
from orchestrator.storage.run_directory import RunDir

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

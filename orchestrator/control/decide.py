"""What to do next: a pure function of the job, the state and what is seen. The controller acts on it.

Failure, resize, stop and the end of training take one road: stop the gang, look at what is there, choose a
layout, start from the last commit. Nothing here reads a clock, a file or a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cluster.workers.gang import Cause, RankStatus
from orchestrator.control.health import Failure, Vitals, bad_commit, first_fault
from orchestrator.control.hints import explain
from orchestrator.job.spec import JobSpec
from orchestrator.job.stability import Skip, is_unstable, next_skip
from orchestrator.planning.layout import Layout

Phase = Literal["prepare", "wait", "start", "train", "stop", "export", "done", "failed", "stopped"]

SETTLE = 3.0
"""Seconds to wait for more workers once the smallest gang fits: nodes and freed resources arrive one by one."""
ROOMY = 10.0
"""Seconds for which there must be room for more workers before the gang grows."""
WORTH = 2.0
"""Times its cost that growing must save over the rest of the run."""


@dataclass(frozen=True)
class State:
    """Where the run is.

    `since` is when the phase began, and `moved` when the last step was seen. `stopping` says why the run is to end,
    `resizing` why the gang is to be replaced though nothing failed. `suspected` is since when a rank complains of a
    peer, and `roomy` since when there has been room for more workers; 0 if it is not so. All times are monotonic.
    """

    phase: Phase = "prepare"
    since: float = 0.0
    attempt: int = 0
    layout: Layout | None = None
    step: int = 0
    moved: float = 0.0
    stopping: str = ""
    resizing: str = ""
    suspected: float = 0.0
    roomy: float = 0.0
    failures: tuple[Failure, ...] = ()
    bad_commits: frozenset[int] = frozenset()
    skips: tuple[Skip, ...] = ()
    outcome: str = ""


@dataclass(frozen=True)
class Observation:
    """One observation, at the monotonic time `now`, which `RankStatus.heard` is in too.

    `capacity` is how many workers could run, without
    nodes that are excluded or will be taken away; `ready` for how many of them all imports are done. `step_seconds`
    and `longest_step` are of the latest steps, `gap` between the latest beats, `restart_seconds` what the last
    change of the gang cost. `spent_hours` and `spent_usd` are the whole job's, all attempts together.
    """

    now: float
    prepared: bool = False
    exported: bool = False
    export_failed: str = ""
    capacity: int = 0
    ready: int = 0
    ranks: tuple[RankStatus, ...] = ()
    gap: float = 0.0
    placement_failed: str = ""
    stop: str = ""
    step_seconds: float = 0.0
    longest_step: float = 0.0
    restart_seconds: float = 0.0
    spent_hours: float = 0.0
    spent_usd: float = 0.0


@dataclass(frozen=True)
class Action:
    """What the controller does. `do` is prepare, wait, start, watch, hold, ask_stop, halt, export or finish."""

    do: str
    reason: str = ""
    layout: Layout | None = None
    first_fault: str = ""
    workers: int = 0


@dataclass(frozen=True)
class Policy:
    """What does not change during a run. `choose` gives the best layout on that many workers, or None, and `predict`
    the seconds that a step under a layout takes."""

    spec: JobSpec
    choose: Callable[[int], Layout | None]
    predict: Callable[[Layout], float] = lambda layout: 1.0 / layout.world


def decide(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    """The next state and the action that leads there."""
    step = {
        "prepare": _prepare,
        "wait": _wait,
        "start": _train,
        "train": _train,
        "stop": _stopped,
        "export": _export,
    }.get(state.phase)
    return step(rules, state, seen) if step else (state, Action("finish", state.outcome))


def _enter(state: State, phase: Phase, seen: Observation, **changes: Any) -> State:
    return dataclasses.replace(state, phase=phase, since=seen.now, **changes)


def _prepare(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    if seen.stop:
        return _finish(state, seen, "stopped", seen.stop)
    if not seen.prepared:
        return state, Action("prepare", "the data is not prepared yet")
    return _enter(state, "wait", seen), Action("wait", "the data is prepared")


def _wait(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    workers = rules.spec.resources.workers
    if limit := seen.stop or _limit(rules, seen):
        return _finish(state, seen, "stopped", limit)
    waited = seen.now - state.since
    room = min(seen.capacity, workers.max)
    # Later attempts take what is there at once: time without a gang is lost, and one that is too small can grow.
    settle = SETTLE if state.layout is None or room < workers.min else 0.0
    if room < workers.max and waited < settle:
        return state, Action("wait", f"room for {room} of {workers.max} workers")
    layout = rules.choose(room) if room >= workers.min else None
    if layout is not None and layout.world >= workers.min:
        reason = f"{layout.world} workers, layout {layout}"
        changes = {"attempt": state.attempt + 1, "layout": layout, "moved": seen.now}
        changes |= {"resizing": "", "suspected": 0.0, "roomy": 0.0}
        return _enter(state, "start", seen, **changes), Action("start", reason, layout)
    if room == workers.max and waited >= settle:
        text = f"no legal layout uses {workers.min} to {workers.max} workers"
        return _finish(state, seen, "failed", text + "; change resources.workers or train.global_batch")
    if waited > rules.spec.limits.wait:
        text = f"waited {waited:.0f} s for {workers.min} workers and there is room for {seen.capacity}"
        return _finish(state, seen, "failed", text + "; lower resources.workers.min or add machines")
    return state, Action("wait", f"room for {room} workers, and the smallest gang has {workers.min}")


def _train(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    if seen.placement_failed:
        unplaced = Failure(seen.now, state.step, "", seen.placement_failed, Cause("unplaced"))
        return _failed(rules, state, seen, unplaced)
    step = max((r.step for r in seen.ranks), default=-1)
    # Of some ranks there may be news that is later than the look.
    heard = max((seen.now, *(r.heard for r in seen.ranks)))
    if step >= 0 and state.phase == "start":
        # Said before anything else, a fault included, so that every step belongs to a training phase.
        return _enter(state, "train", seen, step=step, moved=heard), Action("watch")
    if step > state.step:
        state = dataclasses.replace(state, step=step, moved=heard)
    if any(r.state == "failed" for r in seen.ranks) and not state.suspected:
        state = dataclasses.replace(state, suspected=seen.now)
    if fault := _fault(state, seen):
        return _failed(rules, state, seen, fault)
    if seen.ranks and all(r.state == "done" for r in seen.ranks):
        return _ended(state, seen)
    stop = seen.stop or _limit(rules, seen)
    if stop and not state.stopping:
        return dataclasses.replace(state, stopping=stop), Action("ask_stop", stop)
    if state.phase == "train" and not state.stopping and not state.resizing:
        return _resize(rules, state, seen)
    return state, Action("watch")


def _resize(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    """Leave nodes in time that are taken away, and use room for more workers where that pays."""
    if leaving := sorted({r.node for r in seen.ranks if r.leaving}):
        reason = f"{', '.join(leaving)} will be taken away"
        return dataclasses.replace(state, resizing=reason), Action("ask_stop", reason)
    if state.layout is None:
        return state, Action("watch")
    room = min(seen.capacity, rules.spec.resources.workers.max)
    larger = rules.choose(room) if room > state.layout.world else None
    if larger is None or larger.world <= state.layout.world:
        return dataclasses.replace(state, roomy=0.0), Action("watch")
    if not state.roomy:
        return dataclasses.replace(state, roomy=seen.now), Action("watch")
    left = (rules.spec.train.steps - state.step) * seen.step_seconds
    saved = left * (1 - rules.predict(larger) / rules.predict(state.layout))
    if seen.now - state.roomy < ROOMY or saved < WORTH * seen.restart_seconds:
        return state, Action("watch")
    if seen.ready < larger.world:
        return state, Action("hold", f"{larger.world} workers are made ready", workers=larger.world)
    reason = f"there is room for {larger.world} workers, which saves {saved:.0f} s"
    return dataclasses.replace(state, resizing=reason), Action("ask_stop", reason)


def _ended(state: State, seen: Observation) -> tuple[State, Action]:
    """All ranks are done, with a commit in place."""
    result = seen.ranks[0].result
    if result["ended"] == "steps":
        return _enter(state, "export", seen, step=result["step"]), Action("halt", "all steps are done")
    # The gang hears a stop at once, and may have ended before it is seen here.
    stopping = state.stopping or seen.stop
    if state.resizing and not stopping and result["ended"] == "stop":
        return _enter(state, "stop", seen, step=result["step"]), Action("halt", state.resizing)
    text = stopping or f"step {result['step']} is reached, as asked by --until"
    if text.startswith("limits.") and result["step"] > 0:
        # Nobody may come back for it: what there is is written for others.
        ceiling = _enter(state, "export", seen, step=result["step"], outcome="stopped", stopping=text)
        return ceiling, Action("halt", text)
    stopped = _enter(state, "stop", seen, step=result["step"], outcome="stopped", stopping=text)
    return stopped, Action("halt", text)


def _failed(rules: Policy, state: State, seen: Observation, fault: Failure) -> tuple[State, Action]:
    limits = rules.spec.limits
    recent = [f for f in state.failures if seen.now - f.time < limits.restart_window]
    bad = bad_commit(fault.text)
    same = fault.repeats(recent)
    changes: dict[str, Any] = {"failures": (*recent, fault)}
    if bad is not None and bad not in state.bad_commits:
        changes["bad_commits"] = state.bad_commits | {bad}
    elif is_unstable(fault.text):
        changes |= _leave_out(rules, state, fault)
    elif "InputError" in fault.text or same:
        why = "it would repeat" if same else "the input is wrong"
        text = f"{fault.text}; {why}, so the run stops here: {explain(fault.cause, fault.why)}"
        changes |= {"outcome": "failed", "stopping": text}
    elif len(recent) >= limits.restarts:
        window = f"{len(recent) + 1} failures within {limits.restart_window:.0f} s"
        changes |= {"outcome": "failed", "stopping": f"{window}, the last: {fault.text}"}
    elif stop := state.stopping or seen.stop:
        text = f"{stop}; a fault came before the commit that ends a run: {fault.text}"
        changes |= {"outcome": "stopped", "stopping": text}
    return _enter(state, "stop", seen, **changes), Action("halt", fault.text, first_fault=fault.text)


def _leave_out(rules: Policy, state: State, fault: Failure) -> dict[str, Any]:
    """Ranks raise before they commit, so that the last commit is before the fault: from there, without its samples."""
    skip = next_skip(rules.spec.train, state.skips, fault.text)
    if skip is not None:
        return {"skips": (*state.skips, skip), "outcome": "stopped" if state.stopping else ""}
    text = f"{fault.text}; train.stability.retries {rules.spec.train.stability.retries} are spent"
    return {"outcome": "failed", "stopping": f"{text}; lower train.optimizer.lr or look at the data"}


def _stopped(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    """The gang is gone: end here, or take the road again."""
    if state.outcome in ("failed", "stopped"):
        return _finish(state, seen, state.outcome, state.stopping)
    return _enter(state, "wait", seen), Action("wait", "the gang is stopped")


def _export(rules: Policy, state: State, seen: Observation) -> tuple[State, Action]:
    if seen.export_failed:
        text = f"the export failed: {seen.export_failed}; all commits are in place, and the same command exports again"
        return _finish(state, seen, "failed", text)
    if rules.spec.checkpoint.export and not seen.exported:
        if not seen.stop:
            return state, Action("export", "the model is written for others to load")
        text = f"{state.stopping or seen.stop}; the model is not exported, and the same command does it"
        return _finish(state, seen, "stopped", text)
    if state.outcome == "stopped":
        return _finish(state, seen, "stopped", state.stopping)
    return _finish(state, seen, "done", f"{state.step} steps are done")


def _finish(state: State, seen: Observation, outcome: str, text: str) -> tuple[State, Action]:
    phase: Phase = "done" if outcome == "done" else "failed" if outcome == "failed" else "stopped"
    return _enter(state, phase, seen, outcome=text), Action("finish", text)


def _fault(state: State, seen: Observation) -> Failure | None:
    return first_fault(
        Vitals(
            now=seen.now,
            ranks=seen.ranks,
            step=state.step,
            moved=state.moved,
            suspected=state.suspected,
            longest_step=seen.longest_step,
            gap=seen.gap,
            starting=state.phase == "start",
            ending=bool(state.stopping or state.resizing),
        )
    )


def _limit(rules: Policy, seen: Observation) -> str:
    """Which ceiling of the job is reached, in words; empty if none."""
    limits = rules.spec.limits
    if limits.hours is not None and seen.spent_hours >= limits.hours:
        return f"limits.hours {limits.hours:g} is reached"
    if limits.cost_usd is not None and seen.spent_usd >= limits.cost_usd:
        return f"limits.cost_usd {limits.cost_usd:g} is reached"
    return ""

"""What to do next: a pure function of the job, the state and what is seen. The controller acts on it.

Failure, resize, stop and the end of training take one road: stop the gang, look at what is there, choose a
layout, start from the last commit. Nothing here reads a clock, a file or a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cluster.gang import RankStatus
from orchestrator.layout import Layout
from orchestrator.spec import JobSpec

Phase = Literal["prepare", "wait", "start", "train", "stop", "export", "done", "failed", "stopped"]

ENDED: frozenset[str] = frozenset({"done", "failed", "stopped"})

SETTLE = 3.0
"""Seconds to wait for more workers once the smallest gang fits: nodes and freed resources arrive one by one."""
GRACE = 3.0
"""Seconds that a lost connection may wait for the death that explains it to be seen."""
SILENCE = 60.0
"""Seconds after which a rank that does not answer is taken for lost."""
FIRST_STEP = 900.0
"""Seconds that a gang may take to its first step: imports, compilation, reading a checkpoint."""
STALL = 20.0
"""Steps' worth of time without a step after which the gang is taken to hang, but never under SILENCE."""


@dataclass(frozen=True)
class Failure:
    """One attempt that ended badly after `step` steps: which rank, where, and why; `told` if the rank raised it."""

    time: float
    step: int
    where: str
    why: str
    told: bool

    @property
    def text(self) -> str:
        """The first fault in one line."""
        return f"{self.where}: {self.why}" if self.where else self.why


@dataclass(frozen=True)
class State:
    """Where the run is. `since` is when the phase began, unix seconds."""

    phase: Phase = "prepare"
    since: float = 0.0
    attempt: int = 0
    layout: Layout | None = None
    step: int = 0
    moved: float = 0.0
    stopping: str = ""
    failures: tuple[Failure, ...] = ()
    bad_commits: frozenset[int] = frozenset()
    outcome: str = ""


@dataclass(frozen=True)
class Seen:
    """One observation. `capacity` is how many workers would fit, looked at only while no gang runs;
    `spent_hours` and `spent_usd` are the whole job's, all attempts together."""

    now: float
    prepared: bool = False
    exported: bool = False
    capacity: int = 0
    ranks: tuple[RankStatus, ...] = ()
    silent: float = 0.0
    placement_failed: str = ""
    stop: str = ""
    step_seconds: float = 0.0
    spent_hours: float = 0.0
    spent_usd: float = 0.0


@dataclass(frozen=True)
class Action:
    """What the controller does. `do` is prepare, wait, start, watch, ask_stop, halt, export or finish."""

    do: str
    reason: str = ""
    layout: Layout | None = None
    first_fault: str = ""


@dataclass(frozen=True)
class Rules:
    """What does not change during a run. `choose` gives the best layout on that many workers, or None."""

    spec: JobSpec
    choose: Callable[[int], Layout | None]


def decide(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
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


def _enter(state: State, phase: Phase, seen: Seen, **changes: Any) -> State:
    return dataclasses.replace(state, phase=phase, since=seen.now, **changes)


def _prepare(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
    if seen.stop:
        return _finish(state, seen, "stopped", seen.stop)
    if not seen.prepared:
        return state, Action("prepare", "the data is not prepared yet")
    return _enter(state, "wait", seen), Action("wait", "the data is prepared")


def _wait(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
    workers = rules.spec.resources.workers
    if limit := seen.stop or _limit(rules, seen):
        return _finish(state, seen, "stopped", limit)
    waited = seen.now - state.since
    room = min(seen.capacity, workers.max)
    if room < workers.max and waited < SETTLE:
        return state, Action("wait", f"room for {room} of {workers.max} workers")
    layout = rules.choose(room) if room >= workers.min else None
    if layout is not None and layout.world >= workers.min:
        reason = f"{layout.world} workers, layout {layout}"
        changes = {"attempt": state.attempt + 1, "layout": layout, "moved": seen.now}
        return _enter(state, "start", seen, **changes), Action("start", reason, layout)
    if waited > rules.spec.limits.wait:
        text = f"waited {waited:.0f} s for {workers.min} workers and there is room for {seen.capacity}"
        return _finish(state, seen, "failed", text + "; lower resources.workers.min or add machines")
    return state, Action("wait", f"room for {room} workers, and the smallest gang has {workers.min}")


def _train(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
    if seen.placement_failed:
        return _enter(state, "wait", seen), Action("halt", seen.placement_failed)
    step = max((r.step for r in seen.ranks), default=-1)
    if step >= 0 and state.phase == "start":
        # Said before anything else, a fault included, so that every step belongs to a training phase.
        return _enter(state, "train", seen, step=step, moved=seen.now), Action("watch")
    if step > state.step:
        state = dataclasses.replace(state, step=step, moved=seen.now)
    if fault := _fault(state, seen):
        return _failed(rules, state, seen, fault)
    if seen.ranks and all(r.state == "done" for r in seen.ranks):
        return _ended(state, seen)
    stop = seen.stop or _limit(rules, seen)
    if stop and not state.stopping:
        return dataclasses.replace(state, stopping=stop), Action("ask_stop", stop)
    return state, Action("watch")


def _ended(state: State, seen: Seen) -> tuple[State, Action]:
    """All ranks are done, with a commit in place."""
    result = seen.ranks[0].result
    if result["ended"] == "steps":
        return _enter(state, "export", seen, step=result["step"]), Action("halt", "all steps are done")
    text = state.stopping or f"step {result['step']} is reached, as asked by --until"
    stopped = _enter(state, "stop", seen, step=result["step"], outcome="stopped", stopping=text)
    return stopped, Action("halt", text)


def _failed(rules: Rules, state: State, seen: Seen, fault: Failure) -> tuple[State, Action]:
    limits = rules.spec.limits
    recent = [f for f in state.failures if seen.now - f.time < limits.restart_window]
    bad = _bad_commit(fault.text)
    same = [f for f in recent if f.told and fault.told and (f.step, f.why) == (fault.step, fault.why)]
    changes: dict[str, Any] = {"failures": (*recent, fault)}
    if bad is not None and bad not in state.bad_commits:
        changes["bad_commits"] = state.bad_commits | {bad}
    elif "InputError" in fault.text or same:
        why = "it would repeat" if same else "the input is wrong"
        changes |= {"outcome": "failed", "stopping": f"{fault.text}; {why}, so the run stops here"}
    elif len(recent) >= limits.restarts:
        window = f"{len(recent) + 1} failures within {limits.restart_window:.0f} s"
        changes |= {"outcome": "failed", "stopping": f"{window}, the last: {fault.text}"}
    elif state.stopping:
        changes |= {"outcome": "stopped"}
    return _enter(state, "stop", seen, **changes), Action("halt", fault.text, first_fault=fault.text)


def _stopped(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
    """The gang is gone: end here, or take the road again."""
    if state.outcome in ("failed", "stopped"):
        return _finish(state, seen, state.outcome, state.stopping)
    return _enter(state, "wait", seen), Action("wait", "the gang is stopped")


def _export(rules: Rules, state: State, seen: Seen) -> tuple[State, Action]:
    if rules.spec.checkpoint.export and not seen.exported:
        return state, Action("export", "the model is written for others to load")
    return _finish(state, seen, "done", f"{state.step} steps are done")


def _finish(state: State, seen: Seen, outcome: str, text: str) -> tuple[State, Action]:
    phase: Phase = "done" if outcome == "done" else "failed" if outcome == "failed" else "stopped"
    return _enter(state, phase, seen, outcome=text), Action("finish", text)


def _fault(state: State, seen: Seen) -> Failure | None:
    """The first fault of the gang: what was raised first, else who died, else who went silent or hangs."""
    told = sorted((r for r in seen.ranks if r.state == "failed"), key=lambda r: r.failed_at)
    dead = sorted((r for r in seen.ranks if r.state == "dead"), key=lambda r: r.failed_at)
    # A peer's death makes others raise connection errors: the death came first, whoever was heard first.
    late = bool(told) and not dead and seen.now - told[0].failed_at >= GRACE
    if told and (late or not all(_is_consequence(r.error) for r in told)):
        root = next((r for r in told if not _is_consequence(r.error)), told[0])
        return Failure(seen.now, state.step, f"rank {root.rank} on {root.node}", root.error, told=True)
    if dead:
        first = dead[0]
        return Failure(
            seen.now, state.step, f"rank {first.rank} on {first.node} died", first.error, told=False
        )
    if told:
        return None  # a peer will be found dead within GRACE
    still = seen.now - state.moved
    patience = FIRST_STEP if state.phase == "start" else max(SILENCE, STALL * seen.step_seconds)
    if seen.silent > SILENCE:
        return Failure(seen.now, state.step, "", f"no answer from a rank for {seen.silent:.0f} s", told=False)
    if seen.ranks and still > patience and not all(r.state == "done" for r in seen.ranks):
        return Failure(seen.now, state.step, "", f"no step for {still:.0f} s", told=False)
    return None


def _is_consequence(text: str) -> bool:
    """Whether an exception only says that a peer is gone."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "Timed out",
        "DistNetworkError",
        "NCCL",
    )
    return any(sign in text for sign in signs)


def _bad_commit(text: str) -> int | None:
    """The step of the commit that a rank found corrupt, from its error."""
    _, found, rest = text.partition("CorruptCommit: step ")
    digits = rest.split(":")[0].split(" ")[0] if found else ""
    return int(digits) if digits.isdigit() else None


def _limit(rules: Rules, seen: Seen) -> str:
    """Which ceiling of the job is reached, in words; empty if none."""
    limits = rules.spec.limits
    if limits.hours is not None and seen.spent_hours >= limits.hours:
        return f"limits.hours {limits.hours:g} is reached"
    if limits.cost_usd is not None and seen.spent_usd >= limits.cost_usd:
        return f"limits.cost_usd {limits.cost_usd:g} is reached"
    return ""

"""What the life of a run is described with: its state, what is observed of it, and what is done next.

`decide` goes from a state and an observation to the next state and an action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cluster.jobs.admission import Admission
from cluster.workers.gang import RankStatus
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.spec import JobSpec
from orchestrator.controller.health import Failure
from orchestrator.data.samples.skips import Skip
from orchestrator.parallel.layout import Layout

Phase = Literal[
    "queue", "prepare", "wait", "start", "train", "stop", "evaluate", "export", "done", "failed", "stopped"
]
FIRST_RESTART = 10.0
"""Seconds that a change of the gang is taken to cost before one has been measured."""
WORKERS = dict.fromkeys((*ENDED, "export"), 0) | {"evaluate": 1}
"""How many workers a run has a use for, in phases in which it does not train."""
Do = Literal[
    "queue",
    "leave_queue",
    "prepare",
    "wait",
    "start",
    "watch",
    "prewarm",
    "ask_stop",
    "halt",
    "evaluate",
    "export",
    "tasks",
    "finish",
]


@dataclass(frozen=True)
class Stop:
    """Why a run is to end before its last step: `text` is for people.

    The user or a service asked for it, `--until` is reached, or a ceiling of the job under `limits` is.
    """

    kind: Literal["request", "until", "limit"]
    text: str


@dataclass(frozen=True)
class State:
    """Where the run is.

    `since` is when the phase began, and `moved` when the last step was seen, or the last of the batches that are
    `evaluated_batches`, or when the ranks no longer `waited` for storage. `stopping` says why the run is to end,
    `resizing` why the gang is to be replaced though nothing failed, `yielding` which job the run makes room for.
    `suspected` is since when a rank complains of a peer, `roomy` since when there has been room for more workers, and
    `too_small` since when no node of the cluster's would do; 0 if it is not so. All times are monotonic seconds.
    `outcome` is how the run ends or has ended, and `reason` says it for people.

    `evaluating` is the step whose commit is evaluated beside the run now; None if none is, though some may wait: then
    `evaluation_waits` says what for, since `evaluation_since`. `evaluation_failures` counts the tries of the first that
    waits, which is not tried before `evaluation_after`.
    """

    phase: Phase = "prepare"
    since: float = 0.0
    attempt: int = 0
    layout: Layout | None = None
    step: int = 0
    evaluated_batches: int = 0
    moved: float = 0.0
    waited: bool = False
    stopping: Stop | None = None
    resizing: str = ""
    yielding: str = ""
    suspected: float = 0.0
    roomy: float = 0.0
    too_small: float = 0.0
    failures: tuple[Failure, ...] = ()
    bad_commits: frozenset[int] = frozenset()
    skips: tuple[Skip, ...] = ()
    outcome: Outcome | None = None
    reason: str = ""
    evaluating: int | None = None
    evaluation_waits: str = ""
    evaluation_since: float = 0.0
    evaluation_failures: int = 0
    evaluation_after: float = 0.0


@dataclass(frozen=True)
class Observation:
    """What the controller observes, at the monotonic time `now`, which `RankStatus.last_heartbeat` is in too.

    `admission` is what the cluster's queue says, None where the run does not share its cluster. `capacity` is how
    many workers could run, without nodes that are excluded or will be taken away, that of an evaluation beside the
    run included; `ready` for how many of them all imports are done. `restored` is the step of the commit that the
    gang was started from, None but right after a start; `recorded` the last step of which there is a row.
    `step_seconds` and `longest_step` are of the latest steps, `gap` between the latest heartbeats,
    `restart_seconds` what the last change of the gang cost. `unevaluated` are the steps of commits that are to be
    evaluated beside the run, in order, and `evaluation_failed` says why that of the first one has just failed.
    `tasks_done` says that the job's tasks are evaluated, or cannot be. `spent_hours` and `spent_usd` are the whole
    job's, all attempts together. `data_moved` is when a part of data that is still prepared was last done, 0 if all is
    there: ranks may wait for it. `crashed` says what went wrong in the controller itself.
    """

    now: float
    admission: Admission | None = None
    crashed: str = ""
    restored: int | None = None
    recorded: int = 0
    prepared: bool = False
    data_moved: float = 0.0
    exported: bool = False
    export_failed: str = ""
    tasks_done: bool = False
    capacity: int = 0
    ready: int = 0
    ranks: tuple[RankStatus, ...] = ()
    gap: float = 0.0
    placement_failed: str = ""
    stop: Stop | None = None
    step_seconds: float = 0.0
    longest_step: float = 0.0
    restart_seconds: float = 0.0
    spent_hours: float = 0.0
    spent_usd: float = 0.0
    unevaluated: tuple[int, ...] = ()
    evaluation_failed: str = ""

    @property
    def room(self) -> int:
        """How many workers the run may have now."""
        return min(self.capacity, self.admission.room) if self.admission else self.capacity


@dataclass(frozen=True)
class Action:
    """What the controller does; `reason` is for people. `fault` is why a gang is halted, if one is."""

    do: Do
    reason: str = ""
    layout: Layout | None = None
    fault: Failure | None = None
    workers: int = 0


@dataclass(frozen=True)
class Policy:
    """What does not change during a run: the job, and how layouts are planned for its model.

    `choose` gives the best layout on that many workers, or None, and `predict` the seconds that a step under a layout
    takes.
    """

    spec: JobSpec
    choose: Callable[[int], Layout | None]
    predict: Callable[[Layout], float] = lambda layout: 1.0 / layout.world

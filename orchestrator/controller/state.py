"""The data types of the controller's loop: the state of a run, an observation, and the next action.

`decide` maps a state and an observation to the next state and an action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cluster.jobs.admission import Admission
from cluster.workers.device_limits import DeviceLimits, limits_of
from cluster.workers.gang import RankStatus
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.records import worker_kind
from orchestrator.config.resources import ResourceSpec, Workers
from orchestrator.config.spec import JobSpec
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.health import Failure
from orchestrator.data.samples.skips import Skip
from orchestrator.evaluate.config import EvaluateSpec, StopWhen
from orchestrator.parallel.layout import Layout
from orchestrator.train.config import TrainSpec

Phase = Literal[
    "queue", "prepare", "wait", "start", "train", "stop", "evaluate", "export", "done", "failed", "stopped"
]
FIRST_RESTART = 10.0
"""Seconds that a change of the gang is assumed to take before one has been measured."""
WORKERS = dict.fromkeys((*ENDED, "export"), 0) | {"evaluate": 1}
"""How many workers a run can use in each phase in which it does not train."""
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
    """Why a run ends before its last step.

    `kind` is "request" if the user or a service asked for it, "until" if the step of `--until` is reached, "limit" if a
    ceiling under `limits` is reached. `text` is for people.
    """

    kind: Literal["request", "until", "limit"]
    text: str


@dataclass(frozen=True)
class State:
    """The state of a run. All times are monotonic seconds; 0 means that a condition does not hold."""

    phase: Phase = "prepare"
    since: float = 0.0
    """When the phase began."""
    attempt: int = 0
    """The number of the present or last attempt, counted from 1; 0 before the first."""
    layout: Layout | None = None
    """The layout of the present or last attempt."""
    step: int = 0
    """The last optimizer step that was seen."""
    evaluated_batches: int = 0
    """How many batches of held-out text the ranks have evaluated."""
    modules: int = 0
    """How many Python modules the ranks have imported together."""
    moved: float = 0.0
    """When the ranks last made progress: a step, an evaluated batch, an imported module, or the end of a wait for
    storage."""
    waited: bool = False
    """Whether a rank waited for storage when it was last seen."""
    stopping: Stop | None = None
    """Why the run is asked to end."""
    resizing: str = ""
    """Why the gang is to be replaced without a fault; empty if it is not."""
    yielding: str = ""
    """The job that this run makes room for; empty without one."""
    suspected: float = 0.0
    """Since when a rank has reported an error, which may be a lost connection to a dead peer."""
    roomy: float = 0.0
    """Since when the cluster has had room for a larger gang that would pay off."""
    too_small: float = 0.0
    """Since when the cluster has been too small for the run, however idle."""
    failures: tuple[Failure, ...] = ()
    """The faults that count against `limits.restarts`."""
    bad_commits: frozenset[int] = frozenset()
    """Steps of commits that a rank reported as damaged."""
    doubtful_after: int | None = None
    """The step after which commits may be wrong, because a rank computed wrongly; None while none is in doubt."""
    wrong_nodes: frozenset[str] = frozenset()
    """Addresses of nodes that have computed wrongly. They get no ranks while this run lasts."""
    skips: tuple[Skip, ...] = ()
    """Samples that are left out after an instability."""
    outcome: Outcome | None = None
    """How the run ends or has ended; None until it is decided."""
    reason: str = ""
    """Why the run ends this way, for people."""

    rollout_workers: int = 0
    """How many rollout workers, or teacher workers, run or are to be started."""
    without_workers: bool = False
    """Whether the ranks of this attempt do the work of teacher workers, for which there is no room."""
    no_rollouts: float = 0.0
    """Since when no rollout worker has run, while the ranks need one."""
    rollout_failures: int = 0
    """How many rollout workers have failed since the last step or finished unit of work."""
    rollouts_done: int = 0
    """How many units of work rollout workers had finished when they were last seen."""

    evaluating: int | None = None
    """The step of the commit that is being evaluated in the background."""
    evaluation_waits: str = ""
    """The reason why the next evaluation waits; empty if it does not wait."""
    evaluation_since: float = 0.0
    """Since when it waits."""
    evaluation_failures: int = 0
    """How often the evaluation of the first waiting commit has failed."""
    evaluation_after: float = 0.0
    """The earliest time of its next try."""


@dataclass(frozen=True)
class Observation:
    """The observations of the controller in one pass of its loop."""

    now: float
    """The monotonic time of the observation, by the same clock as `RankStatus.last_heartbeat`."""
    admission: Admission | None = None
    """The answer of the cluster's queue, None if the run does not share its cluster."""
    crashed: str = ""
    """The error that the controller itself raised."""
    restored: int | None = None
    """The step of the commit that the gang was started from; None except right after a start."""
    recorded: int = 0
    """The last step that has a row."""
    prepared: bool = False
    """Whether the data is prepared, at least the beginning of streamed data."""
    data_moved: float = 0.0
    """When a part of streamed data was last prepared, monotonic; 0 if all is there. Ranks may wait for the next."""
    exported: bool = False
    """Whether the final model is exported."""
    export_failed: str = ""
    """Why its export failed."""
    tasks_done: bool = False
    """Whether the job's tasks have been evaluated, or cannot be."""
    capacity: int = 0
    """How many workers could run, including the present ones, rollout workers and a background evaluation. Nodes that
    are excluded or will be taken away do not count."""
    ready: int = 0
    """How many of the workers have all imports done."""
    ranks: tuple[RankStatus, ...] = ()
    """The ranks of the gang, empty while none runs."""
    rollout_workers: int = 0
    """How many rollout workers run."""
    rollouts_finished: bool = False
    """Whether the ranks need nothing more of such workers: all logits of a teacher are stored."""
    rollout_failures: tuple[Failure, ...] = ()
    """Why rollout workers have just failed."""
    rollouts_done: int = 0
    """How many units of work rollout workers have finished."""
    rollouts_moved: float = 0.0
    """When a rollout worker last generated a token, monotonic. Ranks may wait for the answer."""
    gap: float = 0.0
    """The longest recent gap between two heartbeats of a rank, in seconds."""
    placement_failed: str = ""
    """Why the last gang could not be placed."""
    stop: Stop | None = None
    """Why the run was asked to stop."""
    step_seconds: float = 0.0
    """The median of the latest steps, in seconds."""
    longest_step: float = 0.0
    """The longest of the latest steps, in seconds."""
    restart_seconds: float = 0.0
    """How long the last change of the gang took."""
    spent_hours: float = 0.0
    """Hours that the job has used, in all attempts."""
    spent_usd: float = 0.0
    """USD that the job has used, in all attempts."""
    unevaluated: tuple[int, ...] = ()
    """The steps of commits that wait for a background evaluation, in order."""
    evaluation_failed: str = ""
    """Why the evaluation of the first waiting commit has just failed."""

    @property
    def room(self) -> int:
        """How many workers the run may have now."""
        return min(self.capacity, self.admission.room) if self.admission else self.capacity


@dataclass(frozen=True)
class Action:
    """The controller's next action."""

    do: Do
    reason: str = ""
    """Why, for people."""
    layout: Layout | None = None
    """The layout of the gang to start."""
    fault: Failure | None = None
    """The fault for which a gang is halted, if any."""
    workers: int = 0
    """How many workers to prewarm."""


@dataclass(frozen=True)
class Policy:
    """The constants of a run: the job, and the planner of its model."""

    resources: ResourceSpec
    limits: LimitSpec
    train: TrainSpec
    checkpoint: CheckpointSpec
    evaluate: EvaluateSpec | None
    stop_when: StopWhen | None
    samples_per_step: int
    """Samples of data that a step reads."""
    rollout_workers: Workers | None
    """The bounds of the number of rollout workers, or of teacher workers, whose life is the same; None if the ranks do
    their work. With a minimum of 0 the ranks do it where there is no room for one."""
    choose: Callable[[int], Layout | None]
    """Returns the best layout for a number of workers, None if no layout is legal and fits."""
    predict: Callable[[Layout], float] = lambda layout: 1.0 / layout.world
    """Returns the seconds of a step under a layout."""
    worker_kind: str = "rollout"
    """"rollout" or "teacher": what such a worker is called, for people."""
    until_reason: str = "as asked by --until"
    """Why the run ends before its last step, for people."""

    @property
    def device_limits(self) -> DeviceLimits:
        """The time limits of a rank or a rollout worker."""
        return limits_of(self.resources.per_worker.gpu, self.train.compile)


def policy_of(job: JobSpec, choose: Callable[[int], Layout | None], **more: Any) -> Policy:
    """Return the policy of a run of a job.

    Args:
        job: the job.
        choose: returns the best layout for a number of workers.
        more: further fields of the policy.
    """
    return Policy(
        resources=job.resources,
        limits=job.limits,
        train=job.train,
        checkpoint=job.checkpoint,
        evaluate=job.evaluate,
        stop_when=job.stop_when,
        samples_per_step=job.reading.samples,
        rollout_workers=job.extra_workers,
        worker_kind=worker_kind(job.workload.objective),
        choose=choose,
        **more,
    )

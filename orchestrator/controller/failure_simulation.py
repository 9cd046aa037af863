"""Simulate a run on a cluster whose failures are drawn at random. The simulated run makes its decisions by `decide`.

This is a discrete-event simulation: time advances to the next failure, repair, growth or end. It is pure, given a seed.
Nodes fail while a gang starts, too. The loss of one node goes back to the last snapshot in the memory of another node,
if there are any. The loss of several nodes at once goes back to the last published commit.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from cluster.workers.device_limits import limits_of
from cluster.workers.gang import Cause, RankStatus
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.controller.decide import ROOMY, SETTLE, decide
from orchestrator.controller.health import STEP_FACTOR
from orchestrator.controller.state import Action, Observation, Policy, State

HOUR = 3600.0
MOST = 10**6
"""Decisions after which the simulation of a run without end stops."""


ENDS = {
    "breaks": "its node broke",
    "software": "its process ended",
    "taken": "its node was taken without notice",
    "hangs": "it made no step",
    "rack": "its rack broke",
}
"""The error message of a lost rank, by the kind of failure."""


@dataclass(frozen=True)
class FailureModel:
    """A cluster and its rates of failure."""

    nodes: int
    """Nodes, spares included."""
    per_node: int
    """Workers on a node."""
    breaks: float
    """Hardware failures of a node per hour."""
    software: float
    """Software failures of a node per hour, after which it is available at once."""
    repair: float
    """Mean seconds of a repair after a hardware failure."""
    restart: float
    """Seconds that a new gang takes to start."""
    stall: float
    """Seconds that a commit delays a step."""
    write: float
    """Seconds from there until the commit is published."""
    interruptions: float = 0.0
    """Interruptions of a node by the spot market per hour."""
    returns: float = HOUR
    """Mean seconds until another node replaces an interrupted one."""
    hangs: float = 0.0
    """Hangs that a node causes per hour. Its process ends then, and it is available at once."""
    rack_nodes: int = 1
    """Nodes of a rack."""
    rack_breaks: float = 0.0
    """Failures of a rack per hour, each of which takes all of its nodes."""
    snapshot_every: int = 0
    """Steps between snapshots in the memory of other nodes; 0 for none."""

    @property
    def rates(self) -> dict[str, float]:
        """Failures per hour for each available node, by kind."""
        return {
            "breaks": self.breaks,
            "software": self.software,
            "taken": self.interruptions,
            "hangs": self.hangs,
            "rack": self.rack_breaks / self.rack_nodes,
        }


@dataclass
class SimulationResult:
    """How a simulated run went."""

    outcome: Outcome | None = None
    reason: str = ""
    seconds: float = 0.0
    """The duration of the run."""
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("steps", "narrow", "lost", "commits", "restarts", "waiting"), 0.0
        )
    )
    """How the duration divides. "narrow" is what steps on fewer workers took beyond a step on all of them."""
    failures: int = 0
    """Failures of nodes in use."""
    attempts: int = 0
    node_hours: float = 0.0
    """Hours of all available nodes, which is what they cost."""

    @property
    def goodput(self) -> float:
        """The share of the time that the kept steps would have taken on all workers."""
        return self.parts["steps"] / self.seconds if self.seconds else 0.0


def young_daly(stall: float, between: float) -> float:
    """Return the best interval between commits in seconds, sqrt(2 * stall * between) (Young, 1974; Daly, 2006).

    Args:
        stall: seconds that a commit costs.
        between: mean seconds between failures.
    """
    return math.sqrt(2.0 * stall * between)


def simulate(policy: Policy, failure_model: FailureModel, seed: int) -> SimulationResult:
    """Simulate a run under `policy` on a set of nodes. Its job must have no export and no evaluation."""
    run = _Run(policy, failure_model, random.Random(seed))
    for _ in range(MOST):
        if run.advance():
            return run.result
    run.result.reason = "the run does not come to an end"
    return run.result


class _Run:
    """A run in simulation. One `RankStatus` stands for the whole gang."""

    def __init__(self, policy: Policy, failure_model: FailureModel, draw: random.Random) -> None:
        self.policy = policy
        self.failure_model = failure_model
        self.draw = draw
        self.result = SimulationResult()
        self.state = State()
        self.now = 0.0
        """Simulated seconds since the run began."""
        self.up = failure_model.nodes
        """Nodes that are available."""
        self.back: list[float] = []
        """When unavailable nodes return, as a heap."""
        self.rank: RankStatus | None = None
        """The gang, None while none runs."""
        self.restored: int | None = None
        """The step that the gang started from; None except right after a start."""
        self.step = 0.0
        """Steps done, fractions included."""
        self.first_step = 0
        """The step at which the attempt began."""
        self.published = 0
        """The step of the last published commit."""
        self.committed = 0
        """The step from which the next attempt goes on: a published commit, or a snapshot."""
        self.seconds = 1.0
        """Seconds of a step under the present layout."""
        self.fastest = math.inf
        """Seconds of a step under the fastest layout so far. A run begins with all its nodes."""

    def advance(self) -> bool:
        """Make one decision and follow it. Return whether the run is over."""
        before = self.state.phase
        self.state, action = decide(self.policy, self.state, self._observe())
        if self.state.phase in ENDED:
            self.result.outcome = self.state.outcome
            self.result.reason = self.state.reason
            self.result.seconds = self.now
            return True
        if action.do == "start":
            self._start(action)
        elif action.do == "watch":
            self._train()
        elif action.do == "ask_stop":
            self._stop()
        elif action.do == "halt":
            self.rank = self.restored = None
        elif action.do == "wait" and self.state.phase == before:
            self._wait()
        return False

    def _observe(self) -> Observation:
        room = self.up * self.failure_model.per_node
        return Observation(
            now=self.now,
            prepared=True,
            exported=True,
            tasks_done=True,
            capacity=room,
            ready=room,
            ranks=(self.rank,) if self.rank else (),
            restored=self.restored,
            recorded=int(self.step),
            step_seconds=self.seconds,
            longest_step=self.seconds,
            gap=1.0,
            restart_seconds=self.failure_model.restart,
        )

    def _pass(self, until: float, part: str) -> None:
        """Advance the time and count it towards `part`. Nodes that return meanwhile become available."""
        while self.back and self.back[0] <= until:
            self.result.node_hours += self.up * (self.back[0] - self.now) / HOUR
            self.result.parts[part] += self.back[0] - self.now
            self.now = heapq.heappop(self.back)
            self.up += 1
        self.result.node_hours += self.up * (until - self.now) / HOUR
        self.result.parts[part] += until - self.now
        self.now = until

    def _start(self, action: Action) -> None:
        assert action.layout is not None
        self.result.attempts += 1
        self.seconds = self.policy.predict(action.layout)
        self.fastest = min(self.fastest, self.seconds)
        self.step = float(self.committed)
        self.first_step = self.committed
        self.restored = self.committed
        self.rank = self._running("running")
        begins = self.now + self.failure_model.restart
        while (at := self._next_failure()) < begins:
            self._pass(at, "restarts")
            if self._fail(math.ceil(action.layout.world / self.failure_model.per_node)):
                return
        self._pass(begins, "restarts")

    def _running(self, state: str, **more: object) -> RankStatus:
        return RankStatus(0, "", 1, state, int(self.step), last_heartbeat=self.now, **more)  # type: ignore[arg-type]

    @property
    def _step_seconds(self) -> float:
        """Seconds of a step, with its share of the stall of commits."""
        return self.seconds + self.failure_model.stall / self.policy.checkpoint.every

    def _train(self) -> None:
        """Train until the next failure, return of a node, growth of the gang, or the last step."""
        layout = self.state.layout
        assert layout is not None
        at = self._next_failure()
        done = self.now + (self.policy.train.steps - self.step) * self._step_seconds
        grows = self.state.roomy + ROOMY if self.state.roomy else math.inf
        first = min(at, done, self.back[0] if self.back else math.inf, grows)
        first = max(first, self.now + min(self._step_seconds, done - self.now))
        elapsed = first - self.now
        share = self.seconds / self._step_seconds
        self._pass(first, "commits")
        self.result.parts["commits"] -= elapsed * share
        self._count(elapsed * share)
        self.step += elapsed / self._step_seconds
        self.rank = self._running("running")
        if first >= done:
            self.step = self.committed = self.policy.train.steps
            self.rank = self._running("done", result={"ended": "steps", "step": int(self.step)})
        elif first >= at:
            self._fail(math.ceil(layout.world / self.failure_model.per_node))

    def _next_failure(self) -> float:
        """Draw the time of the next failure of an available node."""
        failing = sum(self.failure_model.rates.values()) * self.up / HOUR
        return self.now + (self.draw.expovariate(failing) if failing else math.inf)

    def _fail(self, in_use: int) -> bool:
        """Draw a failure and let it hit a node. Return whether it is one of the `in_use` nodes that run ranks."""
        rates = self.failure_model.rates
        kind = self.draw.choices([*rates], [*rates.values()])[0]
        is_in_use = self.draw.random() < in_use / self.up
        away = {
            "breaks": self.failure_model.repair,
            "rack": self.failure_model.repair,
            "taken": self.failure_model.returns,
        }.get(kind)
        if away:
            lost = min(self.failure_model.rack_nodes, self.up) if kind == "rack" else 1
            self.up -= lost
            for _ in range(lost):
                heapq.heappush(self.back, self.now + self.draw.expovariate(1.0 / away))
        if not is_in_use:
            return False
        self.result.failures += 1
        if kind == "taken" and self.policy.resources.notices:
            self.rank = self._running("running", leaving=True)
            return True
        self._lose(has_snapshot=self.failure_model.snapshot_every > 0 and kind != "rack")
        limits = limits_of(self.policy.resources.per_worker.gpu)
        notice = max(limits.hang, STEP_FACTOR * self.seconds) if kind == "hangs" else limits.silence
        self._pass(self.now + notice, "restarts")
        # Each failure hits another rank, so `decide` does not take the program to be the cause.
        number = self.result.failures
        self.rank = RankStatus(
            rank=number,
            node="",
            pid=1,
            state="dead",
            step=int(self.step),
            error=ENDS[kind],
            failed_at=self.now,
            last_heartbeat=self.now,
            cause=Cause("lost"),
        )
        return True

    def _count(self, seconds: float) -> None:
        """Count seconds of steps under the present layout; negative ones if the steps are lost."""
        useful = seconds * self.fastest / self.seconds
        self.result.parts["steps"] += useful
        self.result.parts["narrow"] += seconds - useful

    def _lose(self, has_snapshot: bool) -> None:
        """Lose the steps since the last snapshot, or since the last published commit."""
        every, snapshot_every = self.policy.checkpoint.every, self.failure_model.snapshot_every
        published = self.step - self.failure_model.write / self._step_seconds
        self.published = max(self.published, int(published // every * every))
        self.committed = self.published
        if has_snapshot:
            self.committed = max(
                self.published, self.first_step, int(self.step // snapshot_every * snapshot_every)
            )
        lost = (self.step - self.committed) * self.seconds
        self.result.parts["lost"] += lost
        self._count(-lost)

    def _stop(self) -> None:
        """Stop the gang after the next step, with a commit."""
        self.step += 1.0
        self._pass(self.now + self.seconds, "lost")
        self._pass(self.now + self.failure_model.write, "restarts")
        self.committed = self.published = int(self.step)
        # The fraction of a step beyond the last whole one is lost.
        kept_seconds = (1.0 - (self.step - self.committed)) * self.seconds
        self.result.parts["lost"] -= kept_seconds
        self._count(kept_seconds)
        self.rank = self._running("done", result={"ended": "stop", "step": self.committed})

    def _wait(self) -> None:
        """Wait for more workers, at most as long as the job allows."""
        longest = self.policy.limits.wait + 1.0
        until = self.now + SETTLE
        if self.up * self.failure_model.per_node < self.policy.resources.workers.min:
            until = min(max(self.back[0], until) if self.back else math.inf, self.now + longest)
        self._pass(until, "waiting")

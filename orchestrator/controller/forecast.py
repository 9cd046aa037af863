"""The life of a run on machines that are not here: `decide` itself, on a cluster whose failures are drawn.

Time goes from event to event: a failure, a repair, room for more workers, the last step. Pure, by the random numbers of
a seed. Snapshots in the memory of other nodes are not counted on: a failure goes back to the last published commit.
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
from orchestrator.controller.state import Action, Observation, Policy, State

HOUR = 3600.0
MOST = 10**6
"""Decisions after which a run that does not come to an end is given up."""


ENDS = {
    "breaks": "its node broke",
    "software": "its process ended",
    "taken": "its node was taken without notice",
}
"""What is told of a rank that was lost."""


@dataclass(frozen=True)
class Fleet:
    """The nodes of a cluster, spares included, and what befalls each.

    `breaks` and `software` are failures an hour; after the former a node is away for `repair` seconds. `taken` are
    interruptions of a spot market an hour, `returns` seconds until another node is there. A commit keeps a step waiting
    for `stall` seconds and is published `write` seconds later; `restart` is what a new gang costs.
    """

    nodes: int
    per_node: int
    breaks: float
    software: float
    repair: float
    restart: float
    stall: float
    write: float
    taken: float = 0.0
    returns: float = HOUR


@dataclass
class Life:
    """How a run went: its outcome, seconds in all and by what they were for, failures of nodes in use, starts, and the
    hours of nodes that were there."""

    outcome: Outcome | None = None
    reason: str = ""
    seconds: float = 0.0
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("steps", "lost", "commits", "restarts", "waiting"), 0.0)
    )
    failures: int = 0
    attempts: int = 0
    node_hours: float = 0.0

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were computed that were kept."""
        return self.parts["steps"] / self.seconds if self.seconds else 0.0


def young_daly(stall: float, between: float) -> float:
    """Seconds between commits that lose least: sqrt(2 x stall x seconds between failures) (Young, 1974; Daly, 2006)."""
    return math.sqrt(2.0 * stall * between)


def live(policy: Policy, fleet: Fleet, seed: int) -> Life:
    """The life of a run under `policy` on such a fleet. Its job is to have no export and no evaluation."""
    run = _Run(policy, fleet, random.Random(seed))
    for _ in range(MOST):
        if run.advance():
            return run.life
    run.life.reason = "the run does not come to an end"
    return run.life


class _Run:
    def __init__(self, policy: Policy, fleet: Fleet, draw: random.Random) -> None:
        self.policy, self.fleet, self.draw, self.life = policy, fleet, draw, Life()
        self.state, self.now, self.up = State(), 0.0, fleet.nodes
        self.back: list[float] = []  # when nodes that are away return
        self.rank: RankStatus | None = None
        self.restored: int | None = None
        self.step, self.begun, self.since = (
            0.0,
            0,
            0.0,
        )  # the attempt began at step `begun`, at the time `since`
        self.committed = 0
        self.seconds = 1.0

    def advance(self) -> bool:
        """One decision and what follows of it; whether the run is over."""
        before = self.state.phase
        self.state, action = decide(self.policy, self.state, self._seen())
        if self.state.phase in ENDED:
            self.life.outcome, self.life.reason, self.life.seconds = (
                self.state.outcome,
                self.state.reason,
                self.now,
            )
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

    def _seen(self) -> Observation:
        room = self.up * self.fleet.per_node
        return Observation(
            self.now, prepared=True, exported=True, tasks_done=True, capacity=room, ready=room,
            ranks=(self.rank,) if self.rank else (), restored=self.restored, recorded=int(self.step),
            step_seconds=self.seconds, longest_step=self.seconds, gap=1.0, restart_seconds=self.fleet.restart,
        )  # fmt: skip

    def _pass(self, until: float, what: str) -> None:
        """Let time go on; nodes that are repaired meanwhile are there again."""
        while self.back and self.back[0] <= until:
            self.life.node_hours += self.up * (self.back[0] - self.now) / HOUR
            self.life.parts[what] += self.back[0] - self.now
            self.now, self.up = heapq.heappop(self.back), self.up + 1
        self.life.node_hours += self.up * (until - self.now) / HOUR
        self.life.parts[what] += until - self.now
        self.now = until

    def _start(self, action: Action) -> None:
        assert action.layout is not None
        self._pass(self.now + self.fleet.restart, "restarts")
        self.life.attempts += 1
        self.seconds = self.policy.predict(action.layout)
        self.step, self.begun, self.since = float(self.committed), self.committed, self.now
        self.restored = self.committed
        self.rank = self._running("running")

    def _running(self, state: str, **more: object) -> RankStatus:
        return RankStatus(0, "", 1, state, int(self.step), last_heartbeat=self.now, **more)  # type: ignore[arg-type]

    @property
    def _each(self) -> float:
        """Seconds of a step with its share of a commit."""
        return self.seconds + self.fleet.stall / self.policy.spec.checkpoint.every

    def _train(self) -> None:
        fleet, layout = self.fleet, self.state.layout
        assert layout is not None
        in_use = math.ceil(layout.world / fleet.per_node)
        rates = (fleet.breaks, fleet.software, fleet.taken)
        failing = sum(rates) * self.up / HOUR
        at = self.now + (self.draw.expovariate(failing) if failing else math.inf)
        done = self.now + (self.policy.spec.train.steps - self.step) * self._each
        grows = self.state.roomy + ROOMY if self.state.roomy else math.inf
        first = min(at, done, self.back[0] if self.back else math.inf, grows)
        first = max(first, self.now + min(self._each, done - self.now))
        gone = first - self.now
        share = self.seconds / self._each
        self._pass(first, "steps")
        self.life.parts["steps"] -= gone * (1.0 - share)
        self.life.parts["commits"] += gone * (1.0 - share)
        self.step += gone / self._each
        self.rank = self._running("running")
        if first >= done:
            self.step = self.committed = self.policy.spec.train.steps
            self.rank = self._running("done", result={"ended": "steps", "step": int(self.step)})
        elif first >= at:
            self._fail(rates, in_use)

    def _fail(self, rates: tuple[float, float, float], in_use: int) -> None:
        kind = self.draw.choices(("breaks", "software", "taken"), rates)[0]
        is_in_use = self.draw.random() < in_use / self.up
        away = {"breaks": self.fleet.repair, "software": 0.0, "taken": self.fleet.returns}[kind]
        if away:
            self.up -= 1
            heapq.heappush(self.back, self.now + self.draw.expovariate(1.0 / away))
        if not is_in_use:
            return
        self.life.failures += 1
        if kind == "taken" and self.policy.spec.resources.notices:
            self.rank = self._running("running", leaving=True)
            return
        self._lose()
        silence = limits_of(self.policy.spec.resources.per_worker.gpu).silence
        self._pass(self.now + silence, "restarts")
        # Ranks differ from one failure to the next: the program is not their cause.
        number = self.life.failures
        self.rank = RankStatus(
            number, "", 1, "dead", int(self.step), ENDS[kind], failed_at=self.now, last_heartbeat=self.now,
            cause=Cause("lost"),
        )  # fmt: skip

    def _lose(self) -> None:
        """What was computed since the last published commit is lost."""
        every = self.policy.spec.checkpoint.every
        published = self.step - self.fleet.write / self._each
        self.committed = max(self.committed, self.begun, int(published // every * every))
        lost = (self.step - self.committed) * self.seconds
        self.life.parts["lost"] += lost
        self.life.parts["steps"] -= lost

    def _stop(self) -> None:
        """The gang ends behind the next step, with a commit."""
        self.step += 1.0
        self._pass(self.now + self.seconds, "steps")
        self._pass(self.now + self.fleet.write, "restarts")
        self.committed = int(self.step)
        self.life.parts["steps"] -= (self.step - self.committed) * self.seconds
        self.life.parts["lost"] += (self.step - self.committed) * self.seconds
        self.rank = self._running("done", result={"ended": "stop", "step": self.committed})

    def _wait(self) -> None:
        most = self.policy.spec.limits.wait + 1.0
        until = self.now + SETTLE
        if self.up * self.fleet.per_node < self.policy.spec.resources.workers.min:
            until = min(max(self.back[0], until) if self.back else math.inf, self.now + most)
        self._pass(until, "waiting")

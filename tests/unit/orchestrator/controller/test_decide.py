"""What follows from what: a table of cases for every branch, and properties of all of them."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.jobs.admission import Admission
from cluster.workers.device_limits import COMPILATION, CPU, GPU
from cluster.workers.gang import Cause, RankStatus
from orchestrator.config.outcome import ENDED
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.decide import ROOMY, SETTLE, decide
from orchestrator.controller.health import FIRST_STEP, GRACE, STEP_FACTOR, Failure
from orchestrator.controller.state import Observation, Phase, Policy, State, Stop, policy_of
from orchestrator.data.samples.skips import Skip
from orchestrator.parallel.layout import Layout

NOW = 10_000.0
KILLED, RAISED = Cause("exited", -9), Cause("raised", name="Error")
TWO = Layout(dp=2)


def job(**changes: Any) -> JobSpec:
    """A job for two to four workers, with changes to its parts by name."""
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 100, "global_batch": 8},
        "resources": {"workers": {"min": 2, "max": 4}},
    }
    return parse(document | changes)


def rules(spec: JobSpec | None = None, fits: bool = True) -> Policy:
    """As many data-parallel ranks as there is room for, or nothing that fits."""
    return policy_of(spec or job(), lambda workers: Layout(dp=workers) if fits else None)


def rank(number: int, state: Any = "running", step: int = 7, **more: Any) -> RankStatus:
    return RankStatus(
        number, f"node-{number}", 100 + number, state, step=step, **({"last_heartbeat": NOW} | more)
    )


def failed(number: int, error: str, ago: float = 10.0, step: int = 7) -> RankStatus:
    return rank(number, "failed", step, error=error, failed_at=NOW - ago, cause=CAUSES.get(error, RAISED))


def dead(number: int, ago: float = 0.1, step: int = 7) -> RankStatus:
    return rank(number, "dead", step, error=KILLED.text, failed_at=NOW - ago, cause=KILLED)


def ended(how: str, step: int) -> tuple[RankStatus, ...]:
    return tuple(rank(n, "done", step, result={"step": step, "ended": how}) for n in (0, 1))


def in_phase(phase: Phase, ago: float = 1.0, **more: Any) -> State:
    """A state entered `ago` seconds before NOW; a gang that moved just then, at step 7 of attempt 1."""
    base: dict[str, Any] = {"since": NOW - ago, "moved": NOW - ago}
    if phase not in ("prepare", "wait"):
        base |= {"attempt": 1, "layout": TWO, "step": 7}
    return State(phase=phase, **(base | more))


def told(why: str, ago: float = 100.0, step: int = 7) -> Failure:
    return Failure(NOW - ago, step, "rank 1 on node-1", why, CAUSES.get(why, RAISED), rank=1)


RUNNING = (rank(0), rank(1))
DEATH = Failure(NOW - 100, 7, "rank 1 on node-1 died", KILLED.text, KILLED, rank=1)
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.2]:1"
DIVERGED = "FloatingPointError: loss is nan at step 8"
UNSTABLE = "NonFinite: loss is nan at step 8, samples from position 56"
WRONG = "ComputedWrongly: step 7: rank 1 differs from what other ranks computed (verification.py:250)"
CORRUPT = "CorruptCommit: step 40: shard-00000 is damaged (loop.py:83)"
NO_DATA = "InputError: no data"
CAUSES = {
    RESET: Cause("raised", name="RuntimeError", kind="peer_lost"),
    UNSTABLE: Cause("raised", name="NonFinite", kind="unstable", step=8, position=56),
    CORRUPT: Cause("raised", name="CorruptCommit", kind="corrupt_commit", step=40),
    WRONG: Cause("raised", name="ComputedWrongly", kind="wrong_arithmetic", step=4, ranks=(1,)),
    NO_DATA: Cause("raised", name="InputError", kind="input"),
}
"""What is decided by of an exception; its text is for people."""
USER = Stop("request", "stopped by the user")
HOURS = Stop("limit", "limits.hours 1.5 is reached")
DIED = "rank 1 on node-1 died: process ended with exit code -9"
BEFORE = "a fault came before the commit that ends a run: "


def on_gpu() -> Policy:
    """The rules of a job whose workers have a GPU each."""
    return rules(spec=job(resources=job().resources.model_dump() | {"per_worker": {"gpu": 1}}))


MEASURED = job(
    data=job().data.model_dump() | {"validation": {"share": 0.1}}, evaluate={}, stop_when={"patience": 3}
)

TESTED = job(evaluate={"tasks": ["quiz.yaml"]})


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: what the state becomes and what is done, with other fields of both that matter."""

    name: str
    state: State
    seen: Observation
    phase: str
    do: str
    reason: str = ""
    becomes: dict[str, Any] = dataclasses.field(default_factory=dict)
    rules: Policy = dataclasses.field(default_factory=rules)
    first_fault: str = ""


def see(**fields: Any) -> Observation:
    """An observation in which the data is there, unless it says otherwise."""
    return Observation(now=NOW, **({"prepared": True} | fields))


def queued(**fields: Any) -> Admission:
    """What the queue says to a run that it has admitted, with as much room as it wants."""
    return Admission(**({"go": True, "room": 64} | fields))


PREPARE = (
    Case("data is missing", in_phase("prepare"), see(prepared=False), "prepare", "prepare"),
    Case("data is there", in_phase("prepare"), see(prepared=True), "wait", "wait", becomes={"since": NOW}),
    Case("stop before data", in_phase("prepare"), see(stop=USER), "stopped", "finish", USER.text),
)

WAIT = (
    Case(
        "all the room there may be, at once", in_phase("wait", 0), see(capacity=4), "start", "start",
        "4 workers", {"attempt": 1, "layout": Layout(dp=4), "since": NOW, "moved": NOW},
    ),
    Case(
        "more room than asked for", in_phase("wait", 0), see(capacity=64), "start", "start", "4 workers",
        {"layout": Layout(dp=4)},
    ),
    Case(
        "less room waits for more to settle", in_phase("wait", SETTLE / 2), see(capacity=3), "wait", "wait",
        "room for 3 of 4", {"attempt": 0},
    ),
    Case(
        "a later attempt takes what is there at once", in_phase("wait", 0, layout=TWO), see(capacity=3), "start",
        "start", "3 workers",
    ),
    Case(
        "less room has settled", in_phase("wait", SETTLE), see(capacity=3), "start", "start", "3 workers",
        {"layout": Layout(dp=3)},
    ),
    Case(
        "fewer than the smallest gang", in_phase("wait", 60), see(capacity=1), "wait", "wait",
        "the smallest gang has 2",
    ),
    Case("no room at all", in_phase("wait", 60), see(capacity=0), "wait", "wait", "room for 0"),
    Case(
        "waited too long", in_phase("wait", 601), see(capacity=1), "failed", "finish",
        "waited 601 s for 2 workers and there is room for 1; lower resources.workers.min",
    ),
    Case(
        "no layout fits all the room there may be", in_phase("wait", 60), see(capacity=4), "failed", "finish",
        rules=rules(fits=False),
    ),
    Case(
        "no layout fits for too long", in_phase("wait", 601), see(capacity=4), "failed", "finish",
        rules=rules(fits=False),
    ),
    Case(
        "the layout uses too few", in_phase("wait", 60), see(capacity=4), "failed", "finish",
        rules=policy_of(job(), lambda workers: Layout(dp=1)),
    ),
    Case(
        "the next attempt counts on", in_phase("wait", 60, attempt=3), see(capacity=4), "start", "start",
        becomes={"attempt": 4},
    ),
    Case("stop while waiting", in_phase("wait"), see(capacity=4, stop=USER), "stopped", "finish", USER.text),
    Case(
        "hours are used up", in_phase("wait"), see(capacity=4, spent_hours=2.0), "stopped", "finish",
        "limits.hours 2 is reached", rules=rules(job(limits={"hours": 2})),
    ),
)  # fmt: skip

TRAIN = (
    Case("starting", in_phase("start"), see(ranks=(rank(0, "starting", -1),)), "start", "watch"),
    Case(
        "no room after all", in_phase("start"), see(placement_failed="no room for 4"), "stop", "halt",
        "no room for 4", {"since": NOW, "failures": (Failure(NOW, 7, "", "no room for 4", Cause("unplaced")),)},
        first_fault="no room for 4",
    ),
    Case(
        "the first step", in_phase("start", 30, step=4), see(ranks=(rank(0, step=5), rank(1, step=-1))),
        "train", "watch", becomes={"step": 5, "moved": NOW, "since": NOW},
    ),
    Case(
        "the first step is told before the fault that came with it", in_phase("start", 30, step=4),
        see(ranks=(rank(0, step=5), dead(1, step=5))), "train", "watch", becomes={"step": 5},
    ),
    Case(
        "the first step is told before the end that came with it", in_phase("start", 30, step=99),
        see(ranks=ended("steps", 100)), "train", "watch", becomes={"step": 100},
    ),
    Case(
        "a later step", in_phase("train", 30), see(ranks=(rank(0, step=8), rank(1))), "train", "watch",
        becomes={"step": 8, "moved": NOW, "since": NOW - 30},
    ),
    Case(
        "a step that came after the look, as a frozen controller goes on", in_phase("train", 1),
        see(ranks=(rank(0, step=8, last_heartbeat=NOW + 10), rank(1, last_heartbeat=NOW - 1))), "train", "watch",
        becomes={"step": 8, "moved": NOW + 10},
    ),
    Case("no news", in_phase("train", 1), see(ranks=RUNNING), "train", "watch", becomes={"moved": NOW - 1}),
    Case(
        "a batch of an evaluation is progress too", in_phase("train", 1, evaluated_batches=3),
        see(ranks=(rank(0, evaluated_batches=4), rank(1, evaluated_batches=3))), "train", "watch",
        becomes={"moved": NOW, "step": 7},
    ),
    Case(
        "a library that one rank imports is progress too", in_phase("train", 1, modules=2000),
        see(ranks=(rank(0, modules=1001), rank(1, modules=1000))), "train", "watch",
        becomes={"moved": NOW, "modules": 2001},
    ),
    Case(
        "a library that is imported is no progress later on", in_phase("train", 1, modules=2000),
        see(ranks=(rank(0, modules=1000), rank(1, modules=1000))), "train", "watch", becomes={"moved": NOW - 1},
    ),
    Case(
        "one rank is done before the other", in_phase("train"),
        see(ranks=(ended("steps", 100)[0], rank(1, step=100))), "train", "watch",
    ),
    Case(
        "all steps done", in_phase("train"), see(ranks=ended("steps", 100)), "export", "halt",
        "all steps are done", {"step": 100, "outcome": None},
    ),
    Case(
        "nothing is gained any more", in_phase("train"), see(ranks=ended("plateau", 60)), "export", "halt",
        "validation.loss has not improved in 3 evaluations", {"step": 60, "outcome": None}, rules=rules(MEASURED),
    ),
    Case(
        "the model of a run that ended early is exported",
        in_phase("export", step=60, reason="validation.loss has not improved in 3 evaluations"),
        see(exported=True), "done", "finish", "validation.loss has not improved", {"outcome": "done"},
        rules=rules(MEASURED),
    ),
    Case(
        "nothing was left to do", in_phase("start", step=100),
        see(ranks=tuple(dataclasses.replace(r, step=-1) for r in ended("steps", 100))), "export", "halt",
    ),
    Case(
        "until", in_phase("train"), see(ranks=ended("until", 50)), "stop", "halt",
        "step 50 is reached, as asked by --until", {"outcome": "stopped", "step": 50},
    ),
    Case(
        "up to a rung", in_phase("train"), see(ranks=ended("until", 50)), "stop", "halt",
        "step 50 is reached, a rung of the search",
        {"outcome": "stopped", "step": 50, "reason": "step 50 is reached, a rung of the search"},
        rules=dataclasses.replace(rules(), until_reason="a rung of the search"),
    ),
)  # fmt: skip

STOPS = (
    Case(
        "stop is passed on", in_phase("train"), see(ranks=RUNNING, stop=USER), "train", "ask_stop", USER.text,
        {"stopping": USER},
    ),
    Case(
        "stop is passed on before the first step", in_phase("start"),
        see(ranks=(rank(0, "starting", -1),), stop=USER), "start", "ask_stop", USER.text,
    ),
    Case(
        "stop is asked once", in_phase("train", stopping=USER), see(ranks=RUNNING, stop=USER), "train", "watch",
    ),
    Case(
        "ranks ended as asked", in_phase("train", stopping=USER), see(ranks=ended("stop", 9), stop=USER),
        "stop", "halt", USER.text, {"outcome": "stopped", "step": 9},
    ),
    Case(
        "the last step came first", in_phase("train", stopping=USER),
        see(ranks=ended("steps", 100), stop=USER), "export", "halt",
    ),
    Case(
        "hours", in_phase("train"), see(ranks=RUNNING, spent_hours=1.5), "train", "ask_stop",
        "limits.hours 1.5 is reached", rules=rules(job(limits={"hours": 1.5})),
    ),
    Case(
        "hours left", in_phase("train"), see(ranks=RUNNING, spent_hours=1.4), "train", "watch",
        rules=rules(job(limits={"hours": 1.5})),
    ),
    Case(
        "cost", in_phase("train"), see(ranks=RUNNING, spent_usd=50.0), "train", "ask_stop",
        "limits.cost_usd 50 is reached", rules=rules(job(limits={"cost_usd": 50})),
    ),
    Case(
        "at a ceiling the model is exported", in_phase("train", stopping=HOURS),
        see(ranks=ended("stop", 9), spent_hours=1.5), "export", "halt", "limits.hours 1.5 is reached",
        {"outcome": "stopped", "step": 9}, rules=rules(job(limits={"hours": 1.5})),
    ),
    Case(
        "at a ceiling before the first step there is nothing to export",
        in_phase("train", stopping=HOURS), see(ranks=ended("stop", 0), spent_hours=1.5),
        "stop", "halt", becomes={"outcome": "stopped"}, rules=rules(job(limits={"hours": 1.5})),
    ),
    Case(
        "a fault while stopping ends the run", in_phase("train", stopping=USER),
        see(ranks=(rank(0), dead(1)), stop=USER), "stop", "halt",
        becomes={"outcome": "stopped", "reason": f"{USER.text}; {BEFORE}{DIED}"}, first_fault=DIED,
    ),
    Case(
        "so does one that is seen before the stop", in_phase("train"),
        see(ranks=(rank(0), dead(1)), stop=USER), "stop", "halt",
        becomes={"outcome": "stopped", "reason": f"{USER.text}; {BEFORE}{DIED}"}, first_fault=DIED,
    ),
)  # fmt: skip

FAULTS = (
    Case(
        "a rank died", in_phase("train"), see(ranks=(rank(0), dead(1))), "stop", "halt",
        becomes={"outcome": None, "step": 7}, first_fault="rank 1 on node-1 died: process ended with exit code -9",
    ),
    Case(
        "a rank died before the first step", in_phase("start"),
        see(ranks=(rank(0, "starting", -1), dead(1, step=-1))), "stop", "halt",
        first_fault="rank 1 on node-1 died",
    ),
    Case(
        "the earliest death", in_phase("train"), see(ranks=(dead(0, ago=1), dead(1, ago=2))), "stop", "halt",
        first_fault="rank 1 on node-1 died",
    ),
    Case(
        "a death explains a lost connection", in_phase("train"), see(ranks=(failed(0, RESET, 0.2), dead(1))),
        "stop", "halt", first_fault="rank 1 on node-1 died",
    ),
    Case(
        "a death explains an old lost connection", in_phase("train"),
        see(ranks=(failed(0, RESET, GRACE + 1), dead(1))), "stop", "halt", first_fault="rank 1 on node-1 died",
    ),
    Case(
        "a lost connection waits for its explanation", in_phase("train"),
        see(ranks=(failed(0, RESET), rank(1))), "train", "watch", becomes={"suspected": NOW},
    ),
    Case(
        "it waits no longer than the grace", in_phase("train", suspected=NOW - GRACE / 2),
        see(ranks=(failed(0, RESET), rank(1))), "train", "watch", becomes={"suspected": NOW - GRACE / 2},
    ),
    Case(
        "a lost connection that nothing explains", in_phase("train", suspected=NOW - GRACE),
        see(ranks=(failed(0, RESET, -3600), rank(1))), "stop", "halt",
        first_fault=f"rank 0 on node-0: {RESET}",
    ),
    Case(
        "what was raised, not its consequence", in_phase("train"),
        see(ranks=(failed(0, RESET, 2.0), failed(1, DIVERGED, 1.0))), "stop", "halt",
        first_fault=f"rank 1 on node-1: {DIVERGED}",
    ),
    Case(
        "what was raised first", in_phase("train"),
        see(ranks=(failed(0, "ValueError: late", 1.0), failed(1, "ValueError: early", 2.0))), "stop", "halt",
        first_fault="rank 1 on node-1: ValueError: early",
    ),
    Case(
        "what was raised, not the death that followed", in_phase("train"),
        see(ranks=(failed(0, DIVERGED, 0.1), dead(1))), "stop", "halt",
        first_fault=f"rank 0 on node-0: {DIVERGED}",
    ),
    Case(
        "silence", in_phase("train"),
        see(ranks=(rank(0), rank(1, last_heartbeat=NOW - CPU.silence - 0.1))), "stop", "halt",
        first_fault="rank 1 on node-1: no sign of life for 2.1 s",
    ),
    Case(
        "not silent yet", in_phase("train"), see(ranks=(rank(0), rank(1, last_heartbeat=NOW - CPU.silence))),
        "train", "watch",
    ),
    Case(
        "a GPU that is silent as long is well", in_phase("train", CPU.silence + 1),
        see(ranks=(rank(0), rank(1, last_heartbeat=NOW - GPU.silence + 1))), "train", "watch", rules=on_gpu(),
    ),
    Case(
        "a GPU that is silent for longer is not", in_phase("train"),
        see(ranks=(rank(0), rank(1, last_heartbeat=NOW - GPU.silence - 1))), "stop", "halt", rules=on_gpu(),
        first_fault="rank 1 on node-1: no sign of life for 21.0 s",
    ),
    Case(
        "a step that compiles again", in_phase("train", COMPILATION - 1), see(ranks=RUNNING), "train", "watch",
        rules=rules(spec=job(train=job().train.model_dump() | {"compile": True})),
    ),
    Case(
        "who is done may be silent", in_phase("train"),
        see(ranks=(rank(0), dataclasses.replace(ended("steps", 100)[1], last_heartbeat=0.0))), "train", "watch",
    ),
    Case(
        "where beats come late, silence is judged later", in_phase("train"),
        see(ranks=(rank(0), rank(1, last_heartbeat=NOW - 5)), gap=1.5), "train", "watch",
    ),
    Case(
        "a hang", in_phase("train", CPU.hang + 1), see(ranks=RUNNING, longest_step=0.1), "stop", "halt",
        first_fault="no step for 11 s",
    ),
    Case(
        "a hang of one rank", in_phase("train", CPU.hang + 1),
        see(ranks=(rank(0), rank(1, step=6)), longest_step=0.1), "stop", "halt",
        first_fault="rank 1 on node-1: no step for 11 s",
    ),
    Case(
        "a hiccup of a busy machine is no hang", in_phase("train", CPU.silence + 3),
        see(ranks=RUNNING, longest_step=0.1), "train", "watch",
    ),
    Case(
        "long steps are no hang", in_phase("train", 100), see(ranks=RUNNING, longest_step=60.0), "train", "watch",
    ),
    Case(
        "a hang in long steps", in_phase("train", STEP_FACTOR * 60 + 1), see(ranks=RUNNING, longest_step=60.0),
        "stop", "halt", first_fault="no step for 181 s",
    ),
    Case(
        "storage may take its time", in_phase("train", 100), see(ranks=(rank(0), rank(1, waiting=True))),
        "train", "watch",
    ),
    Case(
        "the step after a long wait has its time", in_phase("train", 100, waited=True), see(ranks=RUNNING),
        "train", "watch", becomes={"waited": False, "moved": NOW},
    ),
    Case(
        "storage that never answers", in_phase("train", FIRST_STEP + 1), see(ranks=(rank(0), rank(1, waiting=True))),
        "stop", "halt", first_fault="no step for 901 s",
    ),
    Case(
        "the last commit may take its time", in_phase("train", 100, stopping=USER), see(ranks=RUNNING),
        "train", "watch",
    ),
    Case(
        "a slow start is no hang", in_phase("start", 100), see(ranks=(rank(0, "starting", -1),)), "start", "watch",
    ),
    Case(
        "a start may be silent for longer", in_phase("start", 20),
        see(ranks=(rank(0, "starting", -1, last_heartbeat=NOW - 20),)), "start", "watch",
    ),
    Case(
        "a start that is silent for too long", in_phase("start", 40),
        see(ranks=(rank(0, "starting", -1, last_heartbeat=NOW - 31),)), "stop", "halt",
        first_fault="rank 0 on node-0: no sign of life for 31.0 s",
    ),
    Case(
        "a start that never ends", in_phase("start", FIRST_STEP + 1), see(ranks=(rank(0, "starting", -1),)),
        "stop", "halt", first_fault="no step for 901 s",
    ),
)  # fmt: skip

GROWING = {"capacity": 4, "ready": 4, "step_seconds": 2.0, "restart_seconds": 5.0}
"""Room for twice the workers over 93 steps of two seconds: it saves 93 s, and the change costs 5 s."""

RESIZES = (
    Case(
        "a node that is to be taken away", in_phase("train"), see(ranks=(rank(0), rank(1, leaving=True))),
        "train", "ask_stop", "node-1 will be taken away", {"resizing": "node-1 will be taken away"},
    ),
    Case(
        "it is left once", in_phase("train", resizing="node-1 will be taken away"),
        see(ranks=(rank(0), rank(1, leaving=True))), "train", "watch",
    ),
    Case(
        "the gang has left: the road again", in_phase("train", resizing="room"), see(ranks=ended("stop", 9)),
        "stop", "halt", "room", {"outcome": None, "step": 9},
    ),
    Case(
        "the last step came before", in_phase("train", resizing="room"), see(ranks=ended("steps", 100)),
        "export", "halt",
    ),
    Case(
        "a stop comes before a change of size", in_phase("train", resizing="room", stopping=USER),
        see(ranks=ended("stop", 9), stop=USER), "stop", "halt", USER.text, {"outcome": "stopped"},
    ),
    Case(
        "a stop while leaving", in_phase("train", resizing="room"), see(ranks=RUNNING, stop=USER), "train", "ask_stop",
        USER.text, {"stopping": USER},
    ),
    Case(
        "room for more begins", in_phase("train"), see(ranks=RUNNING, **GROWING), "train", "watch",
        becomes={"roomy": NOW},
    ),
    Case(
        "room that has not lasted", in_phase("train", roomy=NOW - ROOMY / 2), see(ranks=RUNNING, **GROWING),
        "train", "watch", becomes={"roomy": NOW - ROOMY / 2},
    ),
    Case(
        "room that went away", in_phase("train", roomy=NOW - ROOMY), see(ranks=RUNNING, capacity=2), "train", "watch",
        becomes={"roomy": 0.0},
    ),
    Case(
        "room that lasts is made ready", in_phase("train", roomy=NOW - ROOMY),
        see(ranks=RUNNING, **{**GROWING, "ready": 2}), "train", "prewarm", "4 workers", {"resizing": ""},
    ),
    Case(
        "room that is ready is used", in_phase("train", roomy=NOW - ROOMY), see(ranks=RUNNING, **GROWING),
        "train", "ask_stop", "room for 4 workers, which saves 93 s",
    ),
    Case(
        "no more than the job wants", in_phase("train", roomy=NOW - ROOMY, layout=Layout(dp=4)),
        see(ranks=RUNNING, **{**GROWING, "capacity": 64}), "train", "watch", becomes={"roomy": 0.0},
    ),
    Case(
        "growing that does not pay", in_phase("train", roomy=NOW - ROOMY, step=95),
        see(ranks=tuple(rank(n, step=95) for n in (0, 1)), **GROWING), "train", "watch",
    ),
)  # fmt: skip

VERDICTS = (
    Case(
        "an instability leaves out its samples", in_phase("train", failures=(told(UNSTABLE),)),
        see(ranks=(failed(0, UNSTABLE), failed(1, UNSTABLE, 9.0))), "stop", "halt",
        becomes={"outcome": None, "skips": (Skip(8, 56, 8),)}, first_fault=UNSTABLE,
    ),
    Case(
        "an instability costs nothing of the budget", in_phase("train"), see(ranks=(failed(0, UNSTABLE),)),
        "stop", "halt", becomes={"outcome": None}, rules=rules(job(limits={"restarts": 0})), first_fault=UNSTABLE,
    ),
    Case(
        "its retries are spent", in_phase("train", skips=(Skip(7, 48, 8), Skip(7, 56, 8), Skip(7, 64, 8))),
        see(ranks=(failed(0, UNSTABLE),)), "stop", "halt",
        becomes={"outcome": "failed", "skips": (Skip(7, 48, 8), Skip(7, 56, 8), Skip(7, 64, 8))},
        first_fault=UNSTABLE,
    ),
    Case(
        "an instability while stopping ends the run", in_phase("train", stopping=USER),
        see(ranks=(failed(0, UNSTABLE),), stop=USER), "stop", "halt",
        becomes={"outcome": "stopped", "skips": (Skip(8, 56, 8),)}, first_fault=UNSTABLE,
    ),
    Case(
        "wrong input is told at once", in_phase("start"),
        see(ranks=(failed(0, NO_DATA, step=-1),)), "stop", "halt",
        becomes={"outcome": "failed"}, first_fault="rank 0 on node-0: InputError: no data",
    ),
    Case(
        "the same fault at the same step", in_phase("train", failures=(told(DIVERGED),)),
        see(ranks=(failed(1, DIVERGED),)), "stop", "halt", becomes={"outcome": "failed"}, first_fault=DIVERGED,
    ),
    Case(
        "the same fault at another step", in_phase("train", failures=(told(DIVERGED, step=3),)),
        see(ranks=(failed(1, DIVERGED),)), "stop", "halt", becomes={"outcome": None}, first_fault=DIVERGED,
    ),
    Case(
        "another fault at the same step", in_phase("train", failures=(told("OSError: disk"),)),
        see(ranks=(failed(1, DIVERGED),)), "stop", "halt", becomes={"outcome": None}, first_fault=DIVERGED,
    ),
    Case(
        "three deaths of one rank at one step are the program's",
        in_phase("train", failures=(DEATH, DEATH)), see(ranks=(dead(1),)), "stop", "halt",
        becomes={"outcome": "failed"}, first_fault="died",
    ),
    Case(
        "three deaths of one rank at one step, of which one was by another signal, are not",
        in_phase("train", failures=(DEATH, dataclasses.replace(DEATH, cause=Cause("exited", -15)))),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": None}, first_fault="died",
    ),
    Case(
        "nor are they if it lost its place, froze and died",
        in_phase("train", failures=tuple(dataclasses.replace(DEATH, cause=Cause(end)) for end in ("lost", "silent"))),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": None}, first_fault="died",
    ),
    Case(
        "wherever it was",
        in_phase("train", failures=(DEATH, dataclasses.replace(DEATH, where="rank 1 on other died", node="other"))),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": "failed"}, first_fault="died",
    ),
    Case(
        "deaths of other ranks at one step are not",
        in_phase("train", failures=(DEATH, DEATH)), see(ranks=(dead(0),)), "stop", "halt", becomes={"outcome": None},
        first_fault="died",
    ),
    Case(
        "two deaths at one step do not repeat",
        in_phase("train", failures=(dataclasses.replace(told(KILLED.text), cause=KILLED),)),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": None}, first_fault="died",
    ),
    Case(
        "the budget is spent", in_phase("train", failures=tuple(told("a", step=n) for n in (1, 2))),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": "failed"},
        rules=rules(job(limits={"restarts": 2})), first_fault="died",
    ),
    Case(
        "the last of the budget", in_phase("train", failures=(told("a", step=1),)),
        see(ranks=(dead(1),)), "stop", "halt", becomes={"outcome": None},
        rules=rules(job(limits={"restarts": 2})), first_fault="died",
    ),
    Case(
        "no budget at all", in_phase("train"), see(ranks=(dead(1),)), "stop", "halt",
        becomes={"outcome": "failed"}, rules=rules(job(limits={"restarts": 0})), first_fault="died",
    ),
    Case(
        "old failures are forgotten",
        in_phase("train", failures=tuple(told("a", ago=50, step=n) for n in (1, 2))),
        see(ranks=(dead(1),)), "stop", "halt",
        becomes={
            "outcome": None,
            "failures": (
                Failure(
                    NOW, 7, "rank 1 on node-1 died", KILLED.text, KILLED, node="node-1", rank=1
                ),
            ),
        },
        rules=rules(job(limits={"restarts": 2, "restart_window": 50})), first_fault="died",
    ),
    Case(
        "a corrupt commit is not tried again", in_phase("start"), see(ranks=(failed(0, CORRUPT, step=-1),)),
        "stop", "halt", becomes={"outcome": None, "bad_commits": frozenset({40})}, first_fault="CorruptCommit",
    ),
    Case(
        "who computes wrongly is named, whoever says so first", in_phase("train", wrong_nodes=frozenset({"node-9"})),
        see(ranks=(failed(0, WRONG), rank(1))), "stop", "halt",
        becomes={
            "outcome": None,
            "doubtful_after": 4,
            "wrong_nodes": frozenset({"node-1", "node-9"}),
            "failures": (
                Failure(
                    NOW, 7, "rank 1 on node-1", WRONG, CAUSES[WRONG], node="node-1", rank=1, wrong_nodes=("node-1",)
                ),
            ),
        },
        first_fault="rank 1 on node-1: ComputedWrongly",
    ),
    Case(
        "no commit is in doubt once the run is back", in_phase("start", doubtful_after=4), see(restored=4),
        "start", "watch", becomes={"doubtful_after": None, "step": 4},
    ),
    Case(
        "the one before it is corrupt as well", in_phase("start", bad_commits=frozenset({60})),
        see(ranks=(failed(0, CORRUPT, step=-1),)), "stop", "halt",
        becomes={"outcome": None, "bad_commits": frozenset({40, 60})}, first_fault="CorruptCommit",
    ),
    Case(
        "a commit that is found corrupt again costs as any fault", in_phase("start", failures=(told(CORRUPT),)),
        see(ranks=(failed(0, CORRUPT, step=-1),)), "stop", "halt",
        becomes={"outcome": None, "bad_commits": frozenset({40})},
        rules=rules(job(limits={"restarts": 2})), first_fault="CorruptCommit",
    ),
    Case(
        "and ends the run in the end", in_phase("start", failures=(told(CORRUPT), told(CORRUPT))),
        see(ranks=(failed(0, CORRUPT, step=-1),)), "stop", "halt", becomes={"outcome": "failed"},
        rules=rules(job(limits={"restarts": 2})), first_fault="CorruptCommit",
    ),
    Case(
        "a corrupt commit is gone once its gang has begun with another",
        in_phase("start", bad_commits=frozenset({40})), see(restored=20, ranks=RUNNING), "train", "watch",
        becomes={"bad_commits": frozenset()},
    ),
    Case(
        "a corrupt commit costs nothing of the budget", in_phase("start"),
        see(ranks=(failed(0, CORRUPT, step=-1),)), "stop", "halt", becomes={"outcome": None},
        rules=rules(job(limits={"restarts": 0})), first_fault="CorruptCommit",
    ),
)  # fmt: skip

ENDS = (
    Case("the gang is gone: the road again", in_phase("stop"), see(), "wait", "wait", becomes={"since": NOW}),
    Case(
        "the gang is gone for good", in_phase("stop", outcome="failed", reason="why"), see(), "failed",
        "finish", "why", {"outcome": "failed", "reason": "why"},
    ),
    Case(
        "the gang is gone as asked", in_phase("stop", outcome="stopped", stopping=USER, reason=USER.text), see(),
        "stopped", "finish", USER.text,
    ),
    Case("an export is to be written", in_phase("export", step=100), see(), "export", "export"),
    Case(
        "the export is there", in_phase("export", step=100), see(exported=True), "done", "finish",
        "100 steps are done",
    ),
    Case(
        "no export is wanted", in_phase("export", step=100), see(), "done", "finish",
        rules=rules(job(checkpoint={"export": None})),
    ),
    Case(
        "the export at a ceiling is there",
        in_phase("export", step=9, outcome="stopped", stopping=HOURS, reason=HOURS.text),
        see(exported=True), "stopped", "finish", "limits.hours 1.5 is reached",
    ),
    Case("a stop does not undo the end", in_phase("export"), see(exported=True, stop=USER), "done", "finish"),
    Case("tasks come after the export", in_phase("export"), see(), "export", "export", rules=rules(TESTED)),
    Case(
        "the tasks are to be evaluated", in_phase("export"), see(exported=True), "export", "tasks",
        "the tasks of the job", rules=rules(TESTED),
    ),
    Case(
        "the tasks are evaluated", in_phase("export", step=9), see(exported=True, tasks_done=True), "done", "finish",
        "9 steps are done", rules=rules(TESTED),
    ),
    Case(
        "a stop does not wait for tasks, nor undo the end", in_phase("export", step=9),
        see(exported=True, stop=USER), "done", "finish", "9 steps are done; its tasks are not evaluated",
        rules=rules(TESTED),
    ),
    Case(
        "tasks at a ceiling", in_phase("export", outcome="stopped", stopping=HOURS, reason=HOURS.text),
        see(exported=True), "export", "tasks", rules=rules(TESTED),
    ),
)  # fmt: skip


QUEUE = (
    Case(
        "another comes first", in_phase("queue"), see(admission=queued(go=False, waits_for="a comes first")),
        "queue", "queue", "waits for its turn: a comes first", {"too_small": 0.0},
    ),
    Case(
        "its turn comes", in_phase("queue"), see(prepared=False, admission=queued()), "prepare", "prepare",
        becomes={"since": NOW},
    ),
    Case("its turn comes again", in_phase("queue"), see(admission=queued()), "wait", "wait"),
    Case(
        "a turn may be waited for as long as it takes", in_phase("queue", 1e6),
        see(admission=queued(go=False, waits_for="a comes first")), "queue", "queue",
    ),
    Case(
        "the cluster is too small", in_phase("queue"),
        see(admission=queued(go=False, waits_for="3 workers", possible=False)), "queue", "queue",
        becomes={"too_small": NOW},
    ),
    Case(
        "the cluster has been too small for long", in_phase("queue", too_small=NOW - 601),
        see(admission=queued(go=False, waits_for="3 workers", possible=False)), "failed", "finish",
        "waited 601 s for 3 workers; lower resources.workers.min",
    ),
    Case(
        "the cluster has grown", in_phase("queue", too_small=NOW - 601), see(admission=queued(go=False)), "queue",
        "queue", becomes={"too_small": 0.0},
    ),
    Case("a stop in the queue", in_phase("queue"), see(stop=USER), "stopped", "finish", USER.text),
    Case(
        "another job needs the workers", in_phase("train"), see(ranks=RUNNING, admission=queued(yield_to="b")),
        "train", "ask_stop", "makes room for b", {"resizing": "makes room for b", "yielding": "b", "outcome": None},
    ),
    Case(
        "the ranks have committed for it", in_phase("train", resizing="makes room for b", yielding="b"),
        see(ranks=ended("stop", 9), admission=queued()), "stop", "halt", "makes room for b",
        {"outcome": None, "step": 9},
    ),
    Case(
        "it goes back into the queue", in_phase("stop", yielding="b", resizing="x"), see(admission=queued()), "queue",
        "leave_queue", "makes room for b", {"yielding": "", "resizing": ""},
    ),
    Case(
        "whom it holds nothing of, it makes room for at once", in_phase("wait"),
        see(capacity=4, admission=queued(yield_to="b")), "queue", "leave_queue", "makes room for b",
    ),
    Case(
        "a stop of the user comes before making room", in_phase("train", resizing="makes room for b", yielding="b"),
        see(ranks=ended("stop", 9), stop=USER), "stop", "halt", USER.text, {"outcome": "stopped"},
    ),
    Case(
        "no more workers than the queue grants", in_phase("wait", SETTLE), see(capacity=4, admission=queued(room=3)),
        "start", "start", "3 workers",
    ),
    Case(
        "the data is gone before a start", in_phase("wait"), see(prepared=False, capacity=4), "prepare", "prepare",
    ),
    Case(
        "a gang begins where it was restored", in_phase("start", step=50),
        see(ranks=(rank(0, "starting", -1),), restored=40), "start", "watch", becomes={"step": 40},
    ),
    Case(
        "rows are later than the last look", in_phase("stop", step=7), see(recorded=9), "wait", "wait",
        becomes={"step": 9},
    ),
    Case(
        "the controller itself fails", in_phase("train"), see(ranks=RUNNING, crashed="OSError: gone"), "failed",
        "finish", "OSError: gone", {"outcome": "failed", "reason": "OSError: gone"},
    ),
)  # fmt: skip
CASES = (*PREPARE, *WAIT, *TRAIN, *STOPS, *FAULTS, *RESIZES, *VERDICTS, *ENDS, *QUEUE)


DECIDED = {
    "since",
    "attempt",
    "layout",
    "step",
    "moved",
    "outcome",
    "bad_commits",
    "skips",
    "too_small",
    "roomy",
}
"""Fields of a state that are decided by."""


def reworded(value: Any) -> Any:
    """The same with every text for people replaced by a code; texts that differ get codes that differ."""
    code = f"<{zlib.crc32(repr(value).encode()):x}>"
    if isinstance(value, tuple):
        return tuple(reworded(item) for item in value)
    if isinstance(value, Stop):
        return dataclasses.replace(value, text=code)
    if isinstance(value, RankStatus):
        return dataclasses.replace(value, error=reworded(value.error))
    if isinstance(value, Failure):
        return dataclasses.replace(value, where=reworded(value.where), why=reworded(value.why))
    if isinstance(value, Admission):
        return dataclasses.replace(value, waits_for=reworded(value.waits_for))
    if isinstance(value, (State, Observation)):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        texts = {
            "reason",
            "resizing",
            "crashed",
            "export_failed",
            "placement_failed",
            "phase",
            "outcome",
            "yielding",
        }
        kept = {name for name in texts if not fields.get(name) or name in ("phase", "outcome", "yielding")}
        return dataclasses.replace(value, **{n: reworded(v) for n, v in fields.items() if n not in kept})
    return code if isinstance(value, str) and value else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_decision_is_made_by_a_text(case: Case) -> None:
    """The table holds with every message replaced by a code: a changed wording changes no behaviour."""
    state, action = decide(case.rules, reworded(case.state), reworded(case.seen))
    assert (state.phase, action.do) == (case.phase, case.do)
    becomes = {name: value for name, value in case.becomes.items() if name in DECIDED}
    assert {name: getattr(state, name) for name in becomes} == becomes
    assert (action.fault is not None) == bool(case.first_fault)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    state, action = decide(case.rules, case.state, case.seen)
    assert (state.phase, action.do) == (case.phase, case.do)
    assert case.reason in action.reason
    assert {name: getattr(state, name) for name in case.becomes} == case.becomes
    if case.first_fault:
        assert action.fault is not None
        assert case.first_fault in action.fault.text
        assert state.failures[-1] == action.fault
    else:
        assert action.fault is None
    assert (action.layout is not None) == (action.do == "start")


def test_a_preemption_with_notice_is_a_stop_with_a_commit_and_no_failure() -> None:
    """Asked for in ray#63968. Without notice it is a death, and counts as any other."""
    noticed, action = decide(rules(), in_phase("train"), see(ranks=(rank(0), rank(1, leaving=True))))
    assert (action.do, action.fault, noticed.failures) == ("ask_stop", None, ())
    left, action = decide(rules(), noticed, see(ranks=ended("stop", 9)))
    assert (left.failures, action.fault) == ((), None)
    died, _ = decide(rules(), in_phase("train"), see(ranks=(rank(0), dead(1))))
    assert len(died.failures) == 1


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (see(ranks=(failed(0, NO_DATA, step=-1),)), "no data; the input is wrong"),
        (see(ranks=(failed(1, DIVERGED),)), f"{DIVERGED}; it would repeat"),
        (see(ranks=(dead(1),)), "2 failures within 3600 s, the last: rank 1"),
    ],
)
def test_a_failed_run_says_why(seen: Observation, wanted: str) -> None:
    given_up = rules(job(limits={"restarts": 1}))
    state, _ = decide(given_up, in_phase("train", failures=(told(DIVERGED),)), seen)
    state, action = decide(given_up, state, Observation(now=NOW + 1))
    assert state.phase == "failed"
    assert wanted in action.reason
    assert (state.outcome, state.reason) == ("failed", action.reason)


def test_one_road_from_a_death_to_the_next_start() -> None:
    state = in_phase("train", attempt=1)
    seen = [
        see(ranks=(rank(0), dead(1))),
        Observation(now=NOW + 1, prepared=True),
        Observation(now=NOW + 2, prepared=True, capacity=4),
    ]
    done = []
    for one in seen:
        state, action = decide(rules(), state, one)
        done.append((state.phase, action.do))
    assert done == [("stop", "halt"), ("wait", "wait"), ("start", "start")]
    assert (state.attempt, state.layout) == (2, Layout(dp=4))
    assert len(state.failures) == 1


# -- properties

TIMES = st.floats(0, 2 * NOW)
ERRORS = st.sampled_from(["", RESET, DIVERGED, CORRUPT, UNSTABLE, NO_DATA, "InputError: no", "NCCL gone"])


@st.composite
def ranks(draw: st.DrawFn) -> tuple[RankStatus, ...]:
    """Any gang within the contract: a rank that is done has a result."""
    found = []
    for number in range(draw(st.integers(0, 3))):
        state = draw(st.sampled_from(["starting", "running", "done", "failed", "dead"]))
        how = {"step": draw(st.integers(0, 100)), "ended": draw(st.sampled_from(["steps", "until", "stop"]))}
        error = draw(ERRORS)
        found.append(
            rank(
                number, state, draw(st.integers(-1, 100)), error=error, failed_at=draw(TIMES),
                result=how if state == "done" else None, cause=CAUSES.get(error, RAISED),
            )
        )  # fmt: skip
    return tuple(found)


STATES = st.builds(
    State,
    phase=st.sampled_from([
        "queue", "prepare", "wait", "start", "train", "stop", "evaluate", "export", "done", "failed", "stopped",
    ]),
    since=TIMES,
    attempt=st.integers(0, 5),
    layout=st.sampled_from([None, TWO]),
    step=st.integers(0, 100),
    moved=TIMES,
    stopping=st.sampled_from([None, USER, HOURS]),
    failures=st.lists(
        st.builds(Failure, TIMES, st.integers(0, 100), ERRORS, ERRORS, st.sampled_from([RAISED, KILLED])), max_size=4
    ).map(tuple),
    bad_commits=st.frozensets(st.integers(0, 100), max_size=3),
    outcome=st.sampled_from([None, "failed", "stopped"]),
    yielding=st.sampled_from(["", "b"]),
)  # fmt: skip
SIGHTS = st.builds(
    Observation,
    now=TIMES,
    prepared=st.booleans(),
    exported=st.booleans(),
    capacity=st.integers(0, 9),
    ranks=ranks(),
    gap=st.floats(0, 100),
    longest_step=st.floats(0, 100),
    placement_failed=st.sampled_from(["", "no room"]),
    stop=st.sampled_from([None, USER, HOURS]),
    crashed=st.sampled_from(["", "", "", "OSError: gone"]),
    restored=st.sampled_from([None, 0, 5]),
    recorded=st.integers(0, 100),
    admission=st.none()
    | st.builds(
        Admission,
        st.booleans(),
        st.integers(0, 9),
        waits_for=st.just("b"),
        yield_to=st.sampled_from(["", "b"]),
        possible=st.booleans(),
    ),
    step_seconds=st.floats(0, 100),
    spent_hours=st.floats(0, 3),
    spent_usd=st.floats(0, 3),
    unevaluated=st.sampled_from([(), (5,), (5, 10)]),
    evaluation_failed=st.sampled_from(["", "", "killed"]),
)
RULES = st.builds(
    rules, st.sampled_from([job(), job(limits={"hours": 1, "cost_usd": 2, "restarts": 1})]), st.booleans()
)
DOES = {
    "queue",
    "leave_queue",
    "prewarm",
    "prepare",
    "wait",
    "start",
    "watch",
    "ask_stop",
    "halt",
    "evaluate",
    "export",
    "finish",
}


@settings(max_examples=300, deadline=None)
@given(RULES, STATES, SIGHTS)
def test_decide_is_total_and_pure(given_rules: Policy, state: State, seen: Observation) -> None:
    first = decide(given_rules, state, seen)
    assert decide(given_rules, state, seen) == first
    after, action = first
    assert action.do in DOES
    assert (action.do == "finish") == (after.phase in ENDED)
    assert (action.do == "start") == (after.attempt == state.attempt + 1)
    if action.do == "start":
        assert after.layout == action.layout
        assert 2 <= action.layout.world <= min(seen.capacity, 4)
    if action.fault is not None:
        assert (action.do, after.phase) == ("halt", "stop")
    if state.phase != "start" or seen.restored is None:
        assert after.bad_commits >= state.bad_commits


@settings(max_examples=100, deadline=None)
@given(RULES, STATES.filter(lambda state: state.phase in ENDED), SIGHTS)
def test_an_end_is_an_end(given_rules: Policy, state: State, seen: Observation) -> None:
    after, action = decide(given_rules, state, seen)
    assert after == state
    assert (action.do, action.reason) == ("finish", state.reason)


@settings(max_examples=50, deadline=None)
@given(STATES, st.lists(SIGHTS, max_size=30))
def test_no_run_outlives_its_budget(state: State, sights: list[Observation]) -> None:
    """However things go, no more than `restarts` failures and one lie within the window of a failure."""
    spec = job(limits={"restarts": 1, "restart_window": 1e6})
    state = dataclasses.replace(state, failures=())
    now, faults = 0.0, 0
    for seen in sights:
        now += 10
        state, action = decide(rules(spec), state, dataclasses.replace(seen, now=now))
        faults += action.fault is not None and action.fault.cause.kind not in ("corrupt_commit", "unstable")
    assert faults <= 2

"""What is evaluated beside a run when: a table of cases, and that training always comes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.jobs.admission import Admission
from cluster.workers.gang import RankStatus
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.decide import RETRY, TRIES, decide
from orchestrator.controller.state import Observation, Phase, Policy, State, Stop, policy_of
from orchestrator.parallel.layout import Layout

NOW = 10_000.0
RUNNING = tuple(RankStatus(n, f"node-{n}", n, "running", 7, last_heartbeat=NOW) for n in (0, 1))
DONE = tuple(
    RankStatus(n, f"node-{n}", n, "done", 100, result={"step": 100, "ended": "steps"}, last_heartbeat=NOW)
    for n in (0, 1)
)
NO_ROOM = "room for one more worker of 1 CPU"
BEGUN = {"evaluating": 5}


def job(**changes: Any) -> JobSpec:
    """A job of two workers, and up to four if it may grow, that is evaluated beside them."""
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": "t.json", "sequence_length": 32},
        "train": {"steps": 100, "global_batch": 8},
        "resources": {"workers": {"min": 1, "max": 2}},
        "evaluate": {"where": "beside", "every": 5},
        "checkpoint": {"export": None},
    }
    document["data"]["validation"] = {"share": 0.1}
    return parse(document | changes)


FIXED, GROWS = job(), job(resources={"workers": {"min": 1, "max": 4}})
SPARED = job(resources={"workers": 2, "spares": 1})


def policy(spec: JobSpec = FIXED) -> Policy:
    return policy_of(spec, lambda workers: Layout(dp=workers))


def at(phase: Phase, **more: Any) -> State:
    return State(phase=phase, **{"since": NOW - 1, "moved": NOW, "layout": Layout(dp=2), "step": 7, **more})


def see(capacity: int, unevaluated: tuple[int, ...] = (5,), **more: Any) -> Observation:
    return Observation(NOW, prepared=True, capacity=capacity, unevaluated=unevaluated, **more)


def trains(capacity: int, unevaluated: tuple[int, ...] = (5,), **more: Any) -> Observation:
    return see(capacity, unevaluated, ranks=RUNNING, **more)


LONG = {"step_seconds": 100.0, "restart_seconds": 1.0, "ready": 2}
"""So much is left that it pays to grow."""


@pytest.mark.parametrize(
    ("state", "seen", "spec", "evaluating", "waits"),
    [
        (at("train"), trains(3), FIXED, 5, ""),
        (at("train"), trains(3, ()), FIXED, None, ""),
        (at("train"), trains(2), FIXED, None, NO_ROOM),
        (at("train", **BEGUN), trains(3), FIXED, 5, ""),
        (at("train", **BEGUN), trains(2), FIXED, None, NO_ROOM),  # a node is gone
        (at("train", **BEGUN), trains(3, (10, 15)), FIXED, 10, ""),  # that of step 5 is done
        (at("train"), trains(3), SPARED, None, NO_ROOM),  # what is spare is for recoveries
        (at("train"), trains(4), SPARED, 5, ""),
        (at("train"), trains(9, admission=Admission(True, 2)), FIXED, None, NO_ROOM),  # it is for other runs
        (at("train"), trains(9, admission=Admission(True, 3)), FIXED, 5, ""),
        # It could grow: none begins, what was begun goes on until the gang is to be replaced.
        (at("train"), trains(3, **LONG), GROWS, None, ""),
        (at("train", **BEGUN), trains(3, **LONG), GROWS, 5, ""),
        (at("train", roomy=NOW - 60, **BEGUN), trains(3, **LONG), GROWS, None, NO_ROOM),
        (at("train", roomy=NOW - 60, **BEGUN), trains(4, **LONG), GROWS, None, NO_ROOM),
        (at("train", roomy=NOW - 60, **BEGUN), trains(5, **LONG), GROWS, 5, ""),
        (at("train"), trains(3, restart_seconds=1.0), GROWS, 5, ""),  # it could, and would gain nothing
        (at("train", resizing="grows", **BEGUN), trains(2), FIXED, None, NO_ROOM),
        # Nothing begins while there is no gang; what was begun goes on where nobody needs its worker.
        (at("wait"), see(3), FIXED, None, ""),
        (at("wait", **BEGUN), see(3), FIXED, 5, ""),
        (at("wait", **BEGUN), see(2), FIXED, None, ""),
        (at("stop", **BEGUN), see(3), FIXED, 5, ""),
        (at("stop", outcome=Outcome.STOPPED, **BEGUN), see(9), FIXED, None, ""),
        (at("wait", **BEGUN, ), see(9, stop=Stop("request", "enough")), FIXED, None, ""),
        (at("queue", **BEGUN), see(9, admission=Admission(False)), FIXED, None, ""),
        (at("train", evaluation_failures=1, evaluation_after=NOW + 1), trains(3), FIXED, None, ""),
        (at("train", evaluation_failures=1, evaluation_after=NOW), trains(3), FIXED, 5, ""),
        (at("evaluate"), see(1), FIXED, 5, ""),
        (at("evaluate"), see(0), FIXED, None, NO_ROOM),
    ],
)  # fmt: skip
def test_what_is_evaluated_now(
    state: State, seen: Observation, spec: JobSpec, evaluating: int | None, waits: str
) -> None:
    after, _ = decide(policy(spec), state, seen)
    assert (after.evaluating, after.evaluation_waits) == (evaluating, waits)


def test_a_group_that_shares_a_node_gets_it_whole() -> None:
    state, rules = at("wait", **BEGUN, layout=Layout(tp=2)), policy_of(FIXED, lambda workers: Layout(tp=2))
    assert decide(rules, state, see(3))[0].evaluating is None
    assert decide(rules, at("start", **BEGUN, layout=Layout(tp=2)), see(3))[0].evaluating == 5


def test_a_failed_try_is_followed_by_another_after_a_pause() -> None:
    first, _ = decide(policy(), at("train", **BEGUN), trains(3, evaluation_failed="killed"))
    assert (first.evaluating, first.evaluation_failures) == (None, 1)
    assert first.evaluation_after == NOW + RETRY
    second, _ = decide(policy(), first, trains(3, evaluation_failed="killed"))
    assert second.evaluation_after == NOW + 2 * RETRY
    done, _ = decide(policy(), at("train", evaluation_failures=2, **BEGUN), trains(3, (10,)))
    assert (done.evaluating, done.evaluation_failures) == (10, 0)


@pytest.mark.parametrize(
    ("state", "seen", "phase", "do", "reason"),
    [
        (at("train", evaluation_failures=2), see(2, ranks=DONE), "evaluate", "halt", "all steps are done"),
        (at("evaluate"), see(2), "evaluate", "evaluate", ""),
        (at("evaluate", step=100), see(2, ()), "done", "finish", "100 steps are done"),
        (at("evaluate"), see(2, stop=Stop("request", "enough")), "stopped", "finish", "enough; step 5 is not"),
        (
            at("evaluate", evaluation_failures=TRIES), see(2), "failed", "finish",
            f"the evaluation of step 5 failed {TRIES} times; no checkpoint is lost",
        ),
        (
            at("evaluate", since=NOW - 601, evaluation_waits=NO_ROOM, evaluation_since=NOW - 900), see(0),
            "failed", "finish", f"waited 601 s for {NO_ROOM} to evaluate step 5",
        ),
        (
            at("evaluate", since=NOW - 5, evaluation_waits=NO_ROOM, evaluation_since=NOW - 900), see(0),
            "evaluate", "evaluate", "",
        ),
    ],
)  # fmt: skip
def test_a_run_is_done_when_all_is_evaluated(
    state: State, seen: Observation, phase: str, do: str, reason: str
) -> None:
    after, action = decide(policy(), state, seen)
    assert (after.phase, action.do) == (phase, do)
    assert action.reason.startswith(reason)


PHASES: list[Phase] = ["queue", "prepare", "wait", "start", "train", "stop", "evaluate", "export", "done"]


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        at,
        st.sampled_from(PHASES),
        evaluating=st.sampled_from([None, 5, 10]),
        evaluation_waits=st.sampled_from(["", NO_ROOM]),
        evaluation_failures=st.integers(0, 4),
        evaluation_after=st.sampled_from([0.0, NOW + 9]),
        layout=st.builds(lambda n: Layout(dp=n), st.integers(1, 4)),
        roomy=st.sampled_from([0.0, NOW - 60]),
        resizing=st.sampled_from(["", "", "grows"]),
    ),
    st.builds(
        see,
        st.integers(0, 6),
        st.sampled_from([(), (5,), (5, 10), (10,)]),
        ranks=st.sampled_from([(), RUNNING, DONE]),
        evaluation_failed=st.sampled_from(["", "", "killed"]),
        admission=st.none() | st.builds(Admission, st.booleans(), st.integers(0, 6)),
        step_seconds=st.sampled_from([0.0, 100.0]),
    ),
    st.sampled_from([FIXED, GROWS, SPARED]),
)
def test_training_comes_first(state: State, seen: Observation, spec: JobSpec) -> None:
    """Only the first that waits is evaluated, and never on a worker that the gang has or is about to have."""
    after, action = decide(policy(spec), state, seen)
    assert after.evaluating in (None, *seen.unevaluated[:1])
    if after.evaluating is not None and after.phase in ("start", "train"):
        assert after.layout is not None
        assert seen.room > max(after.layout.world, action.workers) + spec.resources.spares
    if after.evaluating is not None and after.phase == "wait":
        assert seen.room > spec.resources.workers.max
    if action.do == "start" and after.evaluating is not None:
        assert state.evaluating == after.evaluating

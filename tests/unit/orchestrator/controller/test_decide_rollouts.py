"""How many workers generate answers beside a gang, and which of their failures end it: a table of cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.workers.gang import Cause, RankStatus
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.decide import ROLLOUT_FAILURES, ROLLOUT_START, ROLLOUT_STOP, decide
from orchestrator.controller.health import Failure
from orchestrator.controller.state import Observation, Phase, Policy, State, Stop, policy_of
from orchestrator.parallel.layout import Layout

NOW = 10_000.0
DEATH = Failure(NOW, 3, "rollout worker 1 on node-2", "process ended with exit code -9", Cause("exited", -9))
RAISED = dataclasses.replace(DEATH, why="ValueError: no", cause=Cause("raised", name="ValueError"))
WRONG_INPUT = dataclasses.replace(DEATH, why="InputError: no", cause=Cause("raised", name="E", kind="input"))


def job(**changes: Any) -> JobSpec:
    """A job of one or two workers, with one to three more that generate."""
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": "gpt-tiny", "objective": "grpo"},
        "data": {
            "sources": [{"uri": "a.jsonl", "field": {"prompt": "q"}}],
            "tokenizer": "t",
            "sequence_length": 64,
        },
        "train": {"steps": 100, "global_batch": 24},
        "rollout": {"max_tokens": 32, "together": 1, "workers": {"min": 1, "max": 3}},
        "rewards": [{"kind": "length", "length": {"most": 4}}],
        "resources": {"workers": {"min": 1, "max": 2}},
        "checkpoint": {"export": None},
    }
    return parse(document | changes)


JOB = job()
SPARED = job(resources={"workers": {"min": 1, "max": 2}, "spares": 1})


def policy(spec: JobSpec = JOB) -> Policy:
    return policy_of(spec, lambda workers: Layout(dp=min(workers, 2)))


def at(phase: Phase, dp: int = 2, **more: Any) -> State:
    return State(phase=phase, **{"since": NOW - 1, "moved": NOW, "layout": Layout(dp=dp), "step": 7, **more})


def ranks(dp: int = 2, step: int = 7, **more: Any) -> tuple[RankStatus, ...]:
    return tuple(
        RankStatus(n, f"node-{n}", n, "running", step, last_heartbeat=NOW, **more) for n in range(dp)
    )


def see(capacity: int, dp: int = 2, **more: Any) -> Observation:
    return Observation(NOW, **{"prepared": True, "capacity": capacity, "ranks": ranks(dp), **more})


@pytest.mark.parametrize(
    ("state", "seen", "spec", "wanted"),
    [
        (at("train"), see(3), JOB, 1),
        (at("train"), see(4), JOB, 2),
        (at("train"), see(9), JOB, 3),
        (at("train"), see(4), SPARED, 1),
        (at("train"), see(2), JOB, 1),  # a node is gone: the least of them is asked for all the same
        (at("train", dp=1), see(4, dp=1), JOB, 3),
        (at("start"), see(4, ranks=()), JOB, 2),
        (at("train"), see(9, unevaluated=(5,)), JOB, 3),
        (at("train"), see(5, unevaluated=(5,)), JOB, 2),  # the third place is for the evaluation
        (at("train"), see(3, unevaluated=(5,)), JOB, 1),
        (at("stop"), see(4, ranks=()), JOB, 2),  # they stay for the next gang
        (at("wait", dp=1), see(4, ranks=()), JOB, 2),  # which may be larger
        (at("stop", layout=Layout(tp=2)), see(4, ranks=()), JOB, 0),  # these need places on one node
        (at("start", layout=Layout(tp=2)), see(4, ranks=()), JOB, 2),
        (at("train", layout=Layout(tp=2), resizing="to grow"), see(4), JOB, 2),  # the ranks wait for answers
        (State(phase="wait", since=NOW - 1), see(9, ranks=()), JOB, 3),
        (State(phase="wait", since=NOW - 1), see(1, ranks=()), JOB, 0),
        (State(phase="prepare"), see(9, ranks=(), prepared=False), JOB, 0),
        (at("train"), see(9, stop=Stop("request", "x"), ranks=ranks()), JOB, 3),
    ],
)
def test_they_get_the_room_that_training_leaves(
    state: State, seen: Observation, spec: JobSpec, wanted: int
) -> None:
    assert decide(policy(spec), state, seen)[0].rollout_workers == wanted


def test_a_gang_leaves_room_for_the_least_of_them() -> None:
    first = State(phase="wait", since=NOW - 100)
    state, action = decide(policy(), first, see(2, ranks=()))
    assert action.do == "start"
    assert state.layout == Layout(dp=1)
    state, action = decide(policy(), first, see(1, ranks=()))
    assert action.do == "wait"
    assert action.reason == "room for 1 worker, and the smallest gang has 1 and 1 rollout worker"
    late = dataclasses.replace(first, since=NOW - 601)
    state, action = decide(policy(), late, see(1, ranks=()))
    assert state.outcome == Outcome.FAILED
    assert "waited 601 s for 1 worker and 1 rollout worker and there is room for 1" in state.reason


def test_a_lost_one_is_no_fault_but_many_without_a_step_are() -> None:
    lost = see(4, rollout_failures=(DEATH,), rollout_workers=1)
    state, action = decide(policy(), at("train"), lost)
    assert (state.phase, action.do, state.rollout_failures) == ("train", "watch", 1)
    state, action = decide(
        policy(), at("train", rollout_failures=2), dataclasses.replace(lost, ranks=ranks(step=8))
    )
    assert (action.do, state.rollout_failures) == ("watch", 1)  # a step was done since
    done = dataclasses.replace(lost, rollouts_done=5)
    state, action = decide(policy(), at("train", rollout_failures=2, rollouts_done=4), done)
    assert (action.do, state.rollout_failures) == ("watch", 1)  # a unit was finished since
    state, action = decide(policy(), at("train", rollout_failures=ROLLOUT_FAILURES - 1), lost)
    assert (state.phase, action.do, state.outcome) == ("stop", "halt", None)
    assert action.fault is not None
    assert action.fault.text.startswith("rollout worker 1 on node-2")
    again = decide(policy(), dataclasses.replace(state, phase="wait"), see(4, ranks=()))[0]
    assert (again.phase, again.rollout_failures) == ("start", 0)


def test_one_that_raises_the_same_again_ends_the_run_and_wrong_input_does_at_once() -> None:
    before = at("train", rollout_failures=ROLLOUT_FAILURES - 1)
    raised = see(4, rollout_failures=(RAISED,))
    state, _ = decide(policy(), before, raised)
    assert state.outcome is None
    again = dataclasses.replace(before, failures=state.failures)
    assert decide(policy(), again, raised)[0].outcome == Outcome.FAILED
    assert decide(policy(), at("train"), see(4, rollout_failures=(WRONG_INPUT,)))[0].outcome == Outcome.FAILED


def test_a_gang_without_any_is_started_again() -> None:
    state, action = decide(policy(), at("train"), see(3))
    assert (action.do, state.no_rollouts) == ("watch", NOW)
    late = dataclasses.replace(state, no_rollouts=NOW - ROLLOUT_START - 1)
    assert decide(policy(), late, see(3, rollout_workers=1))[0].no_rollouts == 0
    state, action = decide(policy(), late, see(3))
    assert action.do == "halt"
    assert action.fault is not None
    assert action.fault.cause == Cause("unplaced")
    assert action.fault.text == f"no rollout worker has run for {ROLLOUT_START + 1:.0f} s"


def test_ranks_that_wait_for_answers_do_not_hang_while_a_token_comes() -> None:
    waiting = ranks(waiting=True)
    still = at("train", moved=NOW - 1000, waited=True)
    assert decide(policy(), still, see(3, ranks=waiting, rollout_workers=1))[1].do == "halt"
    alive = see(3, ranks=waiting, rollout_workers=1, rollouts_moved=NOW - 5)
    assert decide(policy(), still, alive)[1].do == "watch"


def test_ranks_that_hang_in_training_are_seen_though_workers_generate_ahead() -> None:
    still = at("train", moved=NOW - 1000)
    seen = see(3, ranks=ranks(), rollout_workers=1, rollouts_moved=NOW)
    state, action = decide(policy(), still, seen)
    assert (state.phase, action.do) == ("stop", "halt")
    assert action.fault is not None
    assert action.fault.cause == Cause("still")


def test_weights_that_are_gone_are_sent_again_unless_another_worker_may_have_them() -> None:
    gone = dataclasses.replace(DEATH, why="NoWeights: no", cause=Cause("raised", name="NoWeights"))
    lost = see(4, rollout_failures=(gone,))
    state, action = decide(policy(), at("train"), lost)
    assert (action.do, state.outcome) == ("halt", None)
    assert decide(policy(), at("train"), dataclasses.replace(lost, rollout_workers=1))[1].do == "watch"


def test_a_stop_does_not_wait_long_for_a_rollout_worker() -> None:
    waiting = see(3, ranks=ranks(waiting=True), stop=Stop("request", "by the user"))
    before = at("train", waited=True, stopping=waiting.stop, no_rollouts=NOW - ROLLOUT_STOP + 1)
    assert decide(policy(), before, waiting)[1].do == "watch"
    state, action = decide(policy(), dataclasses.replace(before, no_rollouts=NOW - ROLLOUT_STOP - 1), waiting)
    assert (action.do, state.outcome) == ("halt", Outcome.STOPPED)
    busy = dataclasses.replace(waiting, ranks=ranks())
    late = dataclasses.replace(before, waited=False, no_rollouts=NOW - ROLLOUT_STOP - 1)
    assert decide(policy(), late, busy)[1].do == "watch"


def teaching(**workers: int) -> JobSpec:
    """A job of one or two workers, with teacher workers beside them."""
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": "t", "sequence_length": 64},
        "train": {"steps": 100, "global_batch": 24},
        "distill": {"teacher": "runs/large", "logits": {"source": "workers"}, "workers": workers},
        "resources": {"workers": {"min": 1, "max": 2}},
        "checkpoint": {"export": None},
    }
    return parse(document)


TAUGHT = teaching(min=0, max=2)


@pytest.mark.parametrize(
    ("capacity", "workers", "without"),
    [(4, 2, False), (3, 1, False), (2, 0, True), (1, 0, True)],
)
def test_the_ranks_run_the_teacher_where_they_leave_no_room_for_a_teacher_worker(
    capacity: int, workers: int, without: bool
) -> None:
    state, action = decide(policy(TAUGHT), State(phase="wait", since=NOW - 100), see(capacity, ranks=()))
    assert action.do == "start"
    assert (state.rollout_workers, state.without_workers) == (workers, without)
    # This attempt's ranks do not ask teacher workers for anything, so none starts where room appears.
    after, _ = decide(policy(TAUGHT), dataclasses.replace(state, phase="train"), see(9))
    assert after.rollout_workers == (0 if without else 2)
    assert not after.no_rollouts or not without


def test_a_job_that_needs_a_teacher_worker_waits_for_it_and_no_longer_than_its_limit() -> None:
    spec = teaching(min=1, max=2)
    first = State(phase="wait", since=NOW - 100)
    _, action = decide(policy(spec), first, see(1, ranks=()))
    assert action.reason == "room for 1 worker, and the smallest gang has 1 and 1 teacher worker"
    state, _ = decide(policy(spec), dataclasses.replace(first, since=NOW - 601), see(1, ranks=()))
    assert "waited 601 s for 1 worker and 1 teacher worker and there is room for 1" in state.reason
    lost = at("train", no_rollouts=NOW - ROLLOUT_START - 1)
    _, action = decide(policy(spec), lost, see(3, ranks=ranks(waiting=True)))
    assert action.fault is not None
    assert action.fault.text == f"no teacher worker has run for {ROLLOUT_START + 1:.0f} s"


@pytest.mark.parametrize("phase", ["start", "train"])
def test_ranks_that_wait_for_a_teacher_worker_without_room_take_over(phase: Phase) -> None:
    lost = at(phase, no_rollouts=NOW - ROLLOUT_STOP - 1)
    seen = see(2, ranks=ranks(step=-1 if phase == "start" else 7, waiting=True))
    state, action = decide(policy(TAUGHT), lost, seen)
    assert action.do == "ask_stop"
    assert action.reason == "there is no room for a teacher worker, so the training workers run the teacher"
    assert state.resizing == action.reason
    again, action = decide(policy(TAUGHT), at("wait", since=NOW - 100), see(2, ranks=()))
    assert (action.do, again.without_workers) == ("start", True)
    # Not while the ranks go on with logits that are there, nor right after a loss, nor while one is on its way.
    for state, seen_now in (
        (lost, see(2)),
        (at(phase, no_rollouts=NOW - 1), seen),
        (dataclasses.replace(lost, rollout_workers=1), seen),
    ):
        assert decide(policy(TAUGHT), state, seen_now)[1].do == "watch"


def test_teacher_workers_end_once_all_logits_are_stored_and_training_gets_their_room() -> None:
    spec = teaching(min=1, max=1)
    done = see(2, dp=1, rollouts_finished=True, step_seconds=10.0)
    state, _ = decide(policy(spec), at("train", dp=1, rollout_workers=1, no_rollouts=NOW - 999), done)
    assert (state.rollout_workers, state.no_rollouts) == (0, 0.0)
    state, action = decide(policy(spec), dataclasses.replace(state, roomy=NOW - 99), done)
    assert action.do in ("prewarm", "ask_stop")
    state, action = decide(policy(spec), State(phase="wait", since=NOW - 100), see(2, ranks=()))
    assert state.layout == Layout(dp=1)
    state, action = decide(
        policy(spec), State(phase="wait", since=NOW - 100), see(2, ranks=(), rollouts_finished=True)
    )
    assert state.layout == Layout(dp=2)

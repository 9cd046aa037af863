"""Decide what a run does next: a pure function of the job, the state and an observation. The controller acts on it.

A fault, a resize, making room for another job, a stop and the end of training all take the same path: stop the gang,
count the workers, choose a layout, start from the last commit. The state covers the whole run, including its time in
the cluster's queue. This module reads no clock, no file and no cluster.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster.workers.gang import Cause, workers_text
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.health import Failure, Vitals, first_fault
from orchestrator.controller.hints import hint_for
from orchestrator.controller.state import Action, Observation, Phase, Policy, State, Stop
from orchestrator.data.samples.skips import next_skip

RETRY = 10.0
"""Seconds between the first failed evaluation of a commit and the next try. Each further failure doubles them."""
LONGEST_PAUSE = 600.0
"""The longest pause between two tries, in seconds."""
TRIES = 3
"""Failed evaluations of one commit after which a run that has done all its steps fails."""
BEGINS = frozenset({"train", "evaluate"})
"""Phases in which a background evaluation may start."""
GOES_ON = BEGINS | {"start", "stop", "wait"}
"""Phases in which a started evaluation may continue."""


def with_evaluation(policy: Policy, state: State, observation: Observation, action: Action) -> State:
    """Decide which checkpoint is evaluated in the background.

    The first waiting commit is evaluated if training leaves a worker for it. A failed evaluation is tried again after a
    growing pause.

    Args:
        policy: the job and its planner.
        state: the state that was decided for training.
        observation: the observation.
        action: the action that was decided for training.

    Returns:
        `state` with its evaluation fields updated.
    """
    first = observation.unevaluated[0] if observation.unevaluated else None
    if first is None or state.phase not in GOES_ON or state.outcome is not None:
        failures = 0 if first is None else state.evaluation_failures
        return _with(state, None, failures=failures)
    evaluating = state.evaluating
    failures = state.evaluation_failures
    after = state.evaluation_after
    if observation.evaluation_failed:
        evaluating = None
        failures += 1
        after = observation.now + min(RETRY * 2 ** (failures - 1), LONGEST_PAUSE)
    elif evaluating is not None and evaluating != first:  # the last one has ended
        evaluating = None
        failures = 0
        after = 0.0
    waits_for = state.evaluation_waits if state.phase not in BEGINS else ""
    if _spare_workers(policy, state, observation, action) < 1:
        evaluating = None
        if state.phase in BEGINS:
            waits_for = f"room for one more worker of {policy.resources.per_worker.bundle}"
    elif state.phase in BEGINS and observation.now >= after and evaluating is None and not state.roomy:
        evaluating = first  # not while `roomy`: the gang is about to grow into the room
    since = (state.evaluation_since or observation.now) if waits_for else 0.0
    return _with(state, evaluating, waits_for=waits_for, since=since, failures=failures, after=after)


def _spare_workers(policy: Policy, state: State, observation: Observation, action: Action) -> int:
    """Return how many workers are left, besides the workers that training has or could use."""
    layout = state.layout
    if state.phase == "evaluate":
        return observation.capacity
    is_between_gangs = state.phase in ("stop", "wait") or bool(state.resizing)
    if layout is None or (layout.tp > 1 and (is_between_gangs or action.do == "start")):
        return 0  # an evaluation could take the room of a tensor-parallel group, which must share a node
    training = _training_workers(policy, state, action) + state.rollout_workers
    return observation.room - training - policy.resources.spares


def _with(
    state: State,
    evaluating: int | None,
    *,
    waits_for: str = "",
    since: float = 0.0,
    failures: int = 0,
    after: float = 0.0,
) -> State:
    return dataclasses.replace(
        state,
        evaluating=evaluating,
        evaluation_waits=waits_for,
        evaluation_since=since,
        evaluation_failures=failures,
        evaluation_after=after,
    )


ROLLOUT_FAILURES = 3
"""The gang restarts after this many failures of rollout workers without a step or a finished unit of work between
them."""
ROLLOUT_START = 240.0
"""Seconds without a rollout worker after which the gang restarts. A worker's imports may take most of this time."""
ROLLOUT_STOP = 30.0
"""Seconds without a rollout worker after which the gang is halted if ranks wait for answers while the run is asked to
stop. The last checkpoint is kept."""
NEED_ROLLOUTS = frozenset({"start", "train", "stop", "wait"})
"""Phases in which rollout workers run, or stay ready for the next gang."""


def with_rollout_workers(policy: Policy, state: State, observation: Observation, action: Action) -> State:
    """Decide how many rollout workers run.

    They get the room that training leaves, within the bounds of the job. `_room` reserves room for the minimum number
    of rollout workers. The same holds for teacher workers, which end once all logits are stored.

    Args:
        policy: the job and its planner.
        state: the state that was decided for training.
        observation: the observation.
        action: the action that was decided for training.

    Returns:
        `state` with the number of rollout workers.
    """
    wanted = policy.rollout_workers
    if wanted is None:
        return state
    are_useless = state.without_workers or observation.rollouts_finished
    if state.phase not in NEED_ROLLOUTS or state.layout is None or are_useless:
        return dataclasses.replace(state, rollout_workers=0, no_rollouts=0.0, rollout_failures=0)
    if state.layout.tp > 1 and (state.phase in ("stop", "wait") or action.do == "start"):
        # Rollout workers could take the room of a tensor-parallel group, which must share a node. The next gang gets
        # new rollout workers.
        return dataclasses.replace(state, rollout_workers=0)
    room = observation.room - _training_workers(policy, state, action) - policy.resources.spares
    if observation.unevaluated and state.phase in BEGINS:
        room -= 1  # an evaluation gets its worker first; later, a rollout worker takes the room again
    return dataclasses.replace(state, rollout_workers=min(max(room, wanted.min), wanted.max))


def _training_workers(policy: Policy, state: State, action: Action) -> int:
    """How many workers training has or could soon use."""
    assert state.layout is not None
    is_between_gangs = state.phase in ("stop", "wait") or bool(state.resizing)
    return max(state.layout.world, action.workers, policy.resources.workers.max if is_between_gangs else 0)


def _room(policy: Policy, observation: Observation) -> int:
    """Return the room for training workers: total room without that of the fewest rollout or teacher workers."""
    others = policy.rollout_workers
    return observation.room - (others.min if others and not observation.rollouts_finished else 0)


def _may_do_without(policy: Policy) -> bool:
    """Return whether the ranks can do the work of teacher workers."""
    return policy.rollout_workers is not None and policy.rollout_workers.min == 0


def _ranks_do_without(policy: Policy, observation: Observation, ranks: int) -> bool:
    """Return whether a gang of so many ranks has to run the teacher itself: it leaves no room for a teacher worker, and
    the job needs none.
    """
    return _may_do_without(policy) and observation.room - ranks - policy.resources.spares < 1


def _lacks_workers(policy: Policy, state: State, observation: Observation) -> bool:
    """Return whether ranks wait for teacher workers for which there is no room any more."""
    if not _may_do_without(policy) or state.rollout_workers:
        return False
    is_long = bool(state.no_rollouts) and observation.now - state.no_rollouts > ROLLOUT_STOP
    return is_long and any(rank.waiting for rank in observation.ranks)


def _with_rollout_progress(state: State, observation: Observation, is_step: bool) -> State:
    """Return the state with the observed rollout workers. `is_step` says whether the ranks did another step."""
    is_better = is_step or observation.rollouts_done > state.rollouts_done
    before = 0 if is_better else state.rollout_failures
    has_workers = observation.rollout_workers or observation.rollouts_finished or state.without_workers
    return dataclasses.replace(
        state,
        no_rollouts=0.0 if has_workers else state.no_rollouts or observation.now,
        rollout_failures=before + len(observation.rollout_failures),
        rollouts_done=observation.rollouts_done,
    )


def _rollout_fault(policy: Policy, state: State, observation: Observation) -> Failure | None:
    """Return the rollout fault that forces a restart of a waiting gang, or None.

    A single failure forces no restart: another worker generates the same answers.
    """
    failed = observation.rollout_failures
    # No other worker may have the weights: the next gang sends them again.
    are_gone = (
        any(failure.cause.name == "NoWeights" for failure in failed) and not observation.rollout_workers
    )
    if failed and (
        failed[-1].cause.kind == "input" or are_gone or state.rollout_failures >= ROLLOUT_FAILURES
    ):
        return dataclasses.replace(failed[-1], step=state.step)
    is_stopped = (state.stopping or observation.stop) and any(rank.waiting for rank in observation.ranks)
    longest = ROLLOUT_STOP if is_stopped else ROLLOUT_START
    if not state.no_rollouts or observation.now - state.no_rollouts <= longest:
        return None
    why = f"no {policy.worker_kind} worker has run for {observation.now - state.no_rollouts:.0f} s"
    return Failure(observation.now, state.step, where="", why=why, cause=Cause("unplaced"))


SETTLE = 3.0
"""Seconds to wait for more workers once the smallest gang fits, because nodes and freed resources arrive one by one."""
ROOMY = 10.0
"""Seconds for which there must be room for a larger gang before the gang grows."""
WORTH = 2.0
"""The gang grows only if growth saves this many times its cost over the rest of the run."""


def resume(limits: LimitSpec, state: State, controller_died: bool) -> State:
    """Return the state in which a controller resumes a run. It is the run's end if controllers died too often.

    Ray restarts a dead controller without limit, and the job itself may kill it by filling its node's memory.

    Args:
        limits: the limits of the job.
        state: the state on record. Its `failures` include each death of a controller since the newest commit.
        controller_died: whether Ray started this controller because the one before died.
    """
    if not controller_died or len(state.failures) <= limits.restarts:
        return state
    text = f"{len(state.failures)} failures within {limits.restart_window:.0f} s without a new commit, the last: "
    text += f"{state.failures[-1].why}; give the controller's node more memory, or run fewer workers there"
    return dataclasses.replace(state, phase="stop", outcome=Outcome.FAILED, reason=text)


def decide(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """Return the next state and the action that leads there."""
    after, action = _decide(policy, state, observation)
    after = with_rollout_workers(policy, after, observation, action)
    return with_evaluation(policy, after, observation, action), action


def _decide(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    if observation.crashed and state.phase not in ENDED:
        return _finish(state, observation, Outcome.FAILED, observation.crashed)
    step = {
        "queue": _queue,
        "prepare": _prepare,
        "wait": _wait,
        "start": _train,
        "train": _train,
        "stop": _stopped,
        "evaluate": _evaluate,
        "export": _export,
    }.get(state.phase)
    return step(policy, state, observation) if step else (state, Action("finish", state.reason))


def _enter(state: State, phase: Phase, observation: Observation, **changes: Any) -> State:
    return dataclasses.replace(state, phase=phase, since=observation.now, **changes)


def _queue(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """Wait for admission. On a cluster that is too small for the run, wait no longer than `limits.wait`."""
    if observation.stop:
        return _finish(state, observation, Outcome.STOPPED, observation.stop.text)
    if observation.admission is None or observation.admission.go:
        admitted = dataclasses.replace(state, too_small=0.0)
        if observation.prepared:
            return _enter(admitted, "wait", observation), Action("wait", "the run is admitted")
        return _enter(admitted, "prepare", observation), Action("prepare", "the run is admitted")
    waits_for = observation.admission.waits_for
    too_small = 0.0 if observation.admission.possible else state.too_small or observation.now
    waited = observation.now - too_small if too_small else 0.0
    if waited > policy.limits.wait:
        text = f"waited {waited:.0f} s for {waits_for}; lower resources.workers.min or add machines"
        return _finish(state, observation, Outcome.FAILED, text)
    return dataclasses.replace(state, too_small=too_small), Action(
        "queue", f"waits for its turn: {waits_for}"
    )


def _yields_to(observation: Observation) -> str:
    """The job that this one must make room for; empty without one."""
    return observation.admission.yield_to if observation.admission else ""


def _requeue(state: State, observation: Observation, other: str) -> tuple[State, Action]:
    """Return to the queue at once, since no gang runs."""
    text = f"makes room for {other}"
    return _enter(state, "queue", observation, yielding="", resizing=""), Action("leave_queue", text)


def _prepare(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    if observation.stop:
        return _finish(state, observation, Outcome.STOPPED, observation.stop.text)
    if other := _yields_to(observation):
        return _requeue(state, observation, other)
    if not observation.prepared:
        return state, Action("prepare", "the data is not prepared yet")
    return _enter(state, "wait", observation), Action("wait", "the data is prepared")


def _wait(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    workers = policy.resources.workers
    if stop := observation.stop or _limit(policy, observation):
        return _finish(state, observation, Outcome.STOPPED, stop.text)
    if other := _yields_to(observation):
        return _requeue(state, observation, other)
    if not observation.prepared:
        return _enter(state, "prepare", observation), Action("prepare", "the data is gone, and is made again")
    waited = observation.now - state.since
    room = min(_room(policy, observation), workers.max)
    # Later attempts start at once on the available workers: waiting costs time, and a small gang can grow later.
    settle = SETTLE if state.layout is None or room < workers.min else 0.0
    if waited < settle and (room < workers.max or _ranks_do_without(policy, observation, room)):
        return state, Action("wait", f"room for {room} of {workers_text(workers.max)}")
    layout = policy.choose(room) if room >= workers.min else None
    if layout is not None and layout.world >= workers.min:
        reason = f"{workers_text(layout.world)}, layout {layout}"
        started = _enter(
            state,
            "start",
            observation,
            attempt=state.attempt + 1,
            layout=layout,
            moved=observation.now,
            resizing="",
            suspected=0.0,
            roomy=0.0,
            no_rollouts=0.0,
            rollout_failures=0,
            without_workers=_ranks_do_without(policy, observation, layout.world),
        )
        return started, Action("start", reason, layout)
    if room == workers.max and waited >= settle:
        text = f"no legal layout uses {workers.text}"
        return _finish(
            state, observation, Outcome.FAILED, text + "; change resources.workers or train.global_batch"
        )
    if waited > policy.limits.wait:
        needed = f"{workers_text(workers.min)}{_rollout_workers_text(policy)}"
        text = f"waited {waited:.0f} s for {needed} and there is room for {observation.room}"
        if state.wrong_nodes:
            text += f", without {', '.join(sorted(state.wrong_nodes))}, which computed wrongly"
        return _finish(
            state, observation, Outcome.FAILED, text + "; lower resources.workers.min or add machines"
        )
    why = f"the smallest gang has {workers.min}{_rollout_workers_text(policy)}"
    if room >= workers.min:
        why = f"no layout of {workers.min} to {room} is legal and fits in their memory"
    rollout_min = policy.rollout_workers.min if policy.rollout_workers else 0
    return state, Action("wait", f"room for {workers_text(room + rollout_min)}, and {why}")


def _rollout_workers_text(policy: Policy) -> str:
    """Return the minimum number of rollout or teacher workers as text for people; empty if the job has none."""
    count = policy.rollout_workers.min if policy.rollout_workers else 0
    return f" and {workers_text(count, policy.worker_kind)}" if count else ""


def _train(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    if state.phase == "start" and observation.restored is not None:
        # The rollback removed the damaged commits, and later saves write these steps again.
        state = dataclasses.replace(
            state, step=observation.restored, bad_commits=frozenset(), doubtful_after=None
        )
    if observation.placement_failed:
        unplaced = Failure(
            observation.now, state.step, where="", why=observation.placement_failed, cause=Cause("unplaced")
        )
        return _failed(policy, state, observation, unplaced)
    step = max((r.step for r in observation.ranks), default=-1)
    # A heartbeat may be newer than the observation.
    heard_at = max((observation.now, *(r.last_heartbeat for r in observation.ranks)))
    if step >= 0 and state.phase == "start":
        # Entered before anything else, even a fault, so that every step belongs to a training phase.
        return _enter(state, "train", observation, step=step, moved=heard_at), Action("watch")
    before, state = state.step, _with_progress(state, observation, step, heard_at)
    if policy.rollout_workers is not None:
        state = _with_rollout_progress(state, observation, is_step=state.step > before)
    if any(r.state == "failed" for r in observation.ranks) and not state.suspected:
        state = dataclasses.replace(state, suspected=observation.now)
    if fault := _fault(policy, state, observation) or _rollout_fault(policy, state, observation):
        return _failed(policy, state, observation, fault)
    if observation.ranks and all(r.state == "done" for r in observation.ranks):
        return _completed(policy, state, observation)
    stop = observation.stop or _limit(policy, observation)
    if stop and not state.stopping:
        return dataclasses.replace(state, stopping=stop), Action("ask_stop", stop.text)
    if not state.stopping and not state.resizing and _lacks_workers(policy, state, observation):
        reason = "there is no room for a teacher worker, so the training workers run the teacher"
        return dataclasses.replace(state, resizing=reason), Action("ask_stop", reason)
    if state.phase == "train" and not state.stopping and not state.resizing:
        return _resize(policy, state, observation)
    return state, Action("watch")


def _with_progress(state: State, observation: Observation, step: int, heard_at: float) -> State:
    """Return the state with the progress of a gang, which was heard of at the monotonic time `heard_at`."""
    if step > state.step:
        state = dataclasses.replace(state, step=step, moved=heard_at)
    evaluated = max((r.evaluated_batches for r in observation.ranks), default=0)
    if evaluated != state.evaluated_batches:
        state = dataclasses.replace(state, evaluated_batches=evaluated, moved=heard_at)
    # The first use of a library imports it, and reading its modules may take longer than a step.
    modules = sum(r.modules for r in observation.ranks)
    if modules != state.modules:
        state = dataclasses.replace(state, modules=modules, moved=heard_at)
    if (waits := any(r.waiting for r in observation.ranks)) != state.waited:
        # The time limit of a step starts again when its wait for storage ends.
        state = dataclasses.replace(state, waited=waits, moved=state.moved if waits else heard_at)
    return state


def _resize(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """Replace the gang to make room for another job, to leave nodes that will be taken away, or to grow if it pays.

    A gang that lost workers shrinks in `_wait`.
    """
    if other := _yields_to(observation):
        reason = f"makes room for {other}"
        return dataclasses.replace(state, resizing=reason, yielding=other), Action("ask_stop", reason)
    if leaving := sorted({r.node for r in observation.ranks if r.leaving}):
        reason = f"{', '.join(leaving)} will be taken away"
        return dataclasses.replace(state, resizing=reason), Action("ask_stop", reason)
    if state.layout is None:
        return state, Action("watch")
    room = min(_room(policy, observation), policy.resources.workers.max)
    larger = policy.choose(room) if room > state.layout.world else None
    if larger is None or larger.world <= state.layout.world:
        return dataclasses.replace(state, roomy=0.0), Action("watch")
    seconds_left = (policy.train.steps - state.step) * observation.step_seconds
    saved = seconds_left * (1 - policy.predict(larger) / policy.predict(state.layout))
    if saved < WORTH * observation.restart_seconds:
        return dataclasses.replace(state, roomy=0.0), Action("watch")
    if not state.roomy:
        return dataclasses.replace(state, roomy=observation.now), Action("watch")
    if observation.now - state.roomy < ROOMY:
        return state, Action("watch")
    if observation.ready < larger.world:
        return state, Action("prewarm", f"{larger.world} workers are being prepared", workers=larger.world)
    reason = f"there is room for {larger.world} workers, which saves {saved:.0f} s"
    return dataclasses.replace(state, resizing=reason), Action("ask_stop", reason)


def _completed(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """All ranks are done, and their last commit is published."""
    result = observation.ranks[0].result
    if result["ended"] == "steps":
        next_phase: Phase = "evaluate" if policy.evaluate and policy.evaluate.is_beside else "export"
        done = _enter(
            state, next_phase, observation, step=result["step"], evaluation_failures=0, evaluation_after=0.0
        )
        return done, Action("halt", "all steps are done")
    if result["ended"] == "plateau" and policy.stop_when:
        text = str(policy.stop_when)
        return _enter(state, "export", observation, step=result["step"], reason=text), Action("halt", text)
    # A stop reaches the gang directly, so the ranks may have ended before this function sees it.
    stopping = state.stopping or observation.stop
    if state.resizing and not stopping and result["ended"] == "stop":
        return _enter(state, "stop", observation, step=result["step"]), Action("halt", state.resizing)
    stop = stopping or Stop("until", f"step {result['step']} is reached, {policy.until_reason}")
    ending: dict[str, Any] = {
        "step": result["step"],
        "outcome": Outcome.STOPPED,
        "stopping": stop,
        "reason": stop.text,
    }
    if stop.kind == "limit" and result["step"] > 0:
        # A run at its ceiling may never be resumed, so its model is exported now.
        return _enter(state, "export", observation, **ending), Action("halt", stop.text)
    return _enter(state, "stop", observation, **ending), Action("halt", stop.text)


def _failed(policy: Policy, state: State, observation: Observation, fault: Failure) -> tuple[State, Action]:
    """Decide what follows from a fault: another attempt from the last commit, or the end of the run."""
    limits = policy.limits
    recent = [f for f in state.failures if observation.now - f.time < limits.restart_window]
    cause = fault.cause
    is_repeated = fault.repeats(recent)
    changes: dict[str, Any] = {"failures": (*recent, fault)}
    is_corrupt = cause.kind == "corrupt_commit" and cause.step >= 0
    if is_corrupt:
        changes["bad_commits"] = state.bad_commits | {cause.step}
    if cause.kind == "wrong_arithmetic":
        changes["doubtful_after"] = cause.step
        changes["wrong_nodes"] = state.wrong_nodes.union(fault.wrong_nodes)
    if is_corrupt and not any(f.cause == cause for f in recent):
        pass  # not counted against `limits.restarts`: the next gang starts from another commit
    elif cause.kind == "unstable":
        changes |= _skip_samples(policy, state, fault)
    elif cause.kind == "input" or (is_repeated and not is_corrupt):
        why = "it would repeat" if is_repeated else "the input is wrong"
        text = f"{fault.text}; {why}, so the run stops here: {hint_for(cause)}"
        changes |= {"outcome": Outcome.FAILED, "reason": text}
    elif len(recent) >= limits.restarts:
        window = f"{len(recent) + 1} failures within {limits.restart_window:.0f} s"
        changes |= {"outcome": Outcome.FAILED, "reason": f"{window}, the last: {fault.text}"}
    elif stop := state.stopping or observation.stop:
        text = f"{stop.text}; a fault came before the commit that ends a run: {fault.text}"
        changes |= {"outcome": Outcome.STOPPED, "reason": text}
    return _enter(state, "stop", observation, **changes), Action("halt", fault.text, fault=fault)


def _skip_samples(policy: Policy, state: State, fault: Failure) -> dict[str, Any]:
    """Leave out the samples of an unstable step, from the last commit on. Fail the run once its retries are spent.

    Ranks raise an instability before they commit, so the last commit is before it.
    """
    stability, cause = policy.train.stability, fault.cause
    skip = next_skip(stability, policy.samples_per_step, state.skips, cause.step, cause.position)
    if skip is not None:
        ending = {"outcome": Outcome.STOPPED, "reason": state.stopping.text} if state.stopping else {}
        return {"skips": (*state.skips, skip), **ending}
    text = f"{fault.text}; train.stability.retries {stability.retries} are spent"
    return {"outcome": Outcome.FAILED, "reason": f"{text}; lower train.optimizer.lr or look at the data"}


def _stopped(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """The gang is stopped: end the run, make room for another job, or start again."""
    state = dataclasses.replace(state, step=max(state.step, observation.recorded))
    if state.outcome is not None:
        return _finish(state, observation, state.outcome, state.reason)
    if other := state.yielding or _yields_to(observation):
        return _requeue(state, observation, other)
    return _enter(state, "wait", observation), Action("wait", "the gang is stopped")


def _evaluate(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """All steps are done: wait until every waiting commit is evaluated."""
    if not observation.unevaluated:
        return _export(policy, _enter(state, "export", observation), observation)
    first = observation.unevaluated[0]
    hint = "no checkpoint is lost: run the same command again to evaluate"
    if stop := observation.stop or _limit(policy, observation):
        return _finish(
            state, observation, Outcome.STOPPED, f"{stop.text}; step {first} is not evaluated yet; {hint}"
        )
    if state.evaluation_failures >= TRIES:
        text = f"the evaluation of step {first} failed {TRIES} times; {hint}"
        return _finish(state, observation, Outcome.FAILED, text)
    waited = observation.now - max(state.evaluation_since, state.since) if state.evaluation_since else 0.0
    if waited > policy.limits.wait:
        text = f"waited {waited:.0f} s for {state.evaluation_waits} to evaluate step {first}; {hint}"
        return _finish(state, observation, Outcome.FAILED, text)
    return state, Action("evaluate", "the commits that wait are evaluated")


def _export(policy: Policy, state: State, observation: Observation) -> tuple[State, Action]:
    """Export the model if the job asks for it, then evaluate its tasks, then end the run."""
    if observation.export_failed:
        why = f"the export failed: {observation.export_failed}"
        text = f"{why}; no checkpoint is lost: run the same command again to export"
        return _finish(state, observation, Outcome.FAILED, text)
    if policy.checkpoint.export and not observation.exported:
        if not observation.stop:
            return state, Action("export", f"the commit at step {state.step}")
        text = f"{(state.stopping or observation.stop).text}; the model is not exported: the same command exports it"
        return _finish(state, observation, Outcome.STOPPED, text)
    not_evaluated = ""
    if policy.evaluate and policy.evaluate.tasks and not observation.tasks_done:
        if not observation.stop:
            return state, Action("tasks", "the tasks of the job")
        not_evaluated = "; its tasks are not evaluated: `orchestrator evaluate --tasks` evaluates them"
    if state.outcome == Outcome.STOPPED:
        return _finish(state, observation, Outcome.STOPPED, state.reason + not_evaluated)
    return _finish(
        state, observation, Outcome.DONE, (state.reason or f"{state.step} steps are done") + not_evaluated
    )


def _finish(state: State, observation: Observation, outcome: Outcome, text: str) -> tuple[State, Action]:
    phases: dict[Outcome, Phase] = {Outcome.DONE: "done", Outcome.FAILED: "failed"}
    phase = phases.get(outcome, "stopped")
    return _enter(state, phase, observation, outcome=outcome, reason=text), Action("finish", text)


def _fault(policy: Policy, state: State, observation: Observation) -> Failure | None:
    # Rollout workers may generate ahead while the ranks train: their progress is the gang's only if a rank waits.
    answers_moved = observation.rollouts_moved if any(rank.waiting for rank in observation.ranks) else 0.0
    return first_fault(
        Vitals(
            now=observation.now,
            ranks=observation.ranks,
            step=state.step,
            moved=max(state.moved, observation.data_moved, answers_moved),
            suspected=state.suspected,
            longest_step=observation.longest_step,
            gap=observation.gap,
            starting=state.phase == "start",
            ending=bool(state.stopping or state.resizing),
            limits=policy.device_limits,
        )
    )


def _limit(policy: Policy, observation: Observation) -> Stop | None:
    """The stop for a ceiling of the job that is reached, None below all ceilings."""
    limits = policy.limits
    if limits.hours is not None and observation.spent_hours >= limits.hours:
        return Stop("limit", f"limits.hours {limits.hours:g} is reached")
    if limits.cost_usd is not None and observation.spent_usd >= limits.cost_usd:
        return Stop("limit", f"limits.cost_usd {limits.cost_usd:g} is reached")
    return None

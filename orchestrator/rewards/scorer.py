"""Score answers by the rewards of a job, in parallel processes and never in this one."""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from cluster.workers.machine import processors_here
from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.function_process import checked, scored
from orchestrator.rewards.rules import EXTRA, is_instant, rule_of
from orchestrator.rewards.worker_handle import WorkerProcess

ANSWERS = 180.0
"""Seconds after the time limit of an answer when a worker counts as stuck: it may have to start and to import."""
TRIES = 5
"""How often an answer is scored if something kills the process that scores it."""


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        step: the step of the run that asked for it.
        prompt_number: the number of its prompt.
        k: its number among the answers to that prompt.
        prompt: the text of the prompt.
        text: the text of the answer.
        tokens: its length in tokens.
        columns: the other columns of the prompt's row.
    """

    step: int
    prompt_number: int
    k: int
    prompt: str
    text: str
    tokens: int
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class RewardFailure:
    """An answer that a reward could not score, or that was stopped at a limit.

    Attributes:
        step: see `Answer`.
        prompt_number: see `Answer`.
        k: see `Answer`.
        name: the name of the reward.
        problem: one line.
    """

    step: int
    prompt_number: int
    k: int
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name} {self.problem} at {_place(self)}"


@dataclass(frozen=True, order=True)
class _Task:
    """An answer and a reward, by their numbers."""

    answer: int
    reward: int


class Scorer:
    """Scores answers in worker processes, which start on first use and stay until `close`, or in this process.

    It is used by one thread at a time.

    Attributes:
        failures: the failures of the last call of `score`, in the order of the answers.
        notes: what the machine cannot do to confine code, each once.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], roots: Sequence[str] = (), processes: int | None = None
    ) -> None:
        """
        Args:
            specs: the rewards. Those by a model are left to the caller.
            roots: folders in which own code is found too.
            processes: the most workers; unset: one for each CPU that this process may use.

        Raises InputError if a library is missing.
        """
        self._specs = list(specs)
        self._asked = [number for number, spec in enumerate(specs) if spec.model is None]
        """The numbers of the rewards that are computed here."""
        for number, spec in enumerate(specs):
            if spec.kind == "math" and find_spec("math_verify") is None:
                raise InputError("kind: math needs math-verify", f"rewards.{number}", install(EXTRA))
        self._rewards = [spec.rule for spec in specs]
        # Rules that need no limit save the way to a process and back, which takes longer than they do.
        self._instant = {n: rule_of(each) for n, each in enumerate(self._rewards) if is_instant(each)}
        self._roots = list(roots)
        self._most = processes or processors_here()
        self._workers: list[WorkerProcess] = []
        self.failures: list[RewardFailure] = []
        self.notes: list[str] = []

    def score(
        self, answers: Sequence[Answer], progressed: Callable[[], object] = lambda: None
    ) -> list[dict[str, float]]:
        """Return for each answer its rewards by name, without their weights; NaN where `on_error: skip` left one out.

        `progressed` is called after each reward of an answer.

        Raises InputError for the first answer that fails where `on_error` is stop, and for a reward that cannot score
        at all.
        """
        self.failures = []
        tasks = [_Task(answer, reward) for answer in range(len(answers)) for reward in self._asked]
        instant = {
            task: scored(self._instant[task.reward], vars(answers[task.answer]))
            for task in tasks
            if task.reward in self._instant
        }
        try:
            replies = instant | self._replies(
                [task for task in tasks if task not in instant], answers, progressed
            )
        except BaseException:
            self.close()
            raise
        scores: list[dict[str, float]] = [{} for _ in answers]
        for task in tasks:
            spec = self._specs[task.reward]
            scores[task.answer][spec.title] = self._value(task.reward, answers[task.answer], replies[task])
        return scores

    def of_model(self, number: int, answer: Answer, value: float) -> float:
        """Return what counts as the reward of a model, by the number of the reward, for an answer of the last call.

        It is the value, or if that is not finite what `on_error` says: a failure, 0.0, or NaN to leave the answer out.

        Raises InputError if `on_error` is stop.
        """
        return self._value(number, answer, checked(value))

    def close(self) -> None:
        """End the workers, and everything below them. Safe to call twice."""
        while self._workers:
            self._workers.pop().close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _value(self, number: int, answer: Answer, reply: Mapping[str, Any]) -> float:
        """Return the reward of that number from a reply, and note its problem. Raises InputError."""
        spec = self._specs[number]
        where = f"rewards.{number}"
        if "refused" in reply:
            raise InputError(f"{spec.title}: {reply['refused']}", where, reply["hint"])
        if "problem" in reply:
            numbers = answer.step, answer.prompt_number, answer.k
            self.failures.append(
                failure := RewardFailure(*numbers, name=spec.title, problem=reply["problem"])
            )
            if "value" not in reply and spec.on_error == "stop":
                raise InputError(str(failure), where, "fix it, or set on_error to zero or skip")
        return float(reply.get("value", 0.0 if spec.on_error == "zero" else math.nan))

    def _stops(self, task: _Task, reply: Mapping[str, Any]) -> bool:
        is_fatal = "problem" in reply and "value" not in reply and self._specs[task.reward].on_error == "stop"
        return "refused" in reply or is_fatal

    def _replies(
        self, tasks: Sequence[_Task], answers: Sequence[Answer], progressed: Callable[[], object]
    ) -> dict[_Task, dict[str, Any]]:
        """Return the replies of the workers. After one that stops, there are those of all tasks before it."""
        waiting = deque(tasks)
        replies = dict[_Task, dict[str, Any]]()
        tries = dict[_Task, int]()
        while waiting or any(worker.task is not None for worker in self._workers):
            self._hand_out(waiting, answers)
            for task, reply in self._received():
                progressed()
                tries[task] = tries.get(task, 0) + 1
                if reply.get("again") and tries[task] < TRIES:
                    waiting.appendleft(task)
                    continue
                replies[task] = reply
                self.notes += [note for note in reply.get("notes", ()) if note not in self.notes]
                if self._stops(task, reply):
                    waiting = deque(each for each in waiting if each < task)
        return replies

    def _hand_out(self, waiting: deque[_Task], answers: Sequence[Answer]) -> None:
        """Give tasks to free workers. Starts workers while there are too few."""
        free = [worker for worker in self._workers if worker.task is None]
        while waiting and (free or len(self._workers) < self._most):
            if not free:
                free = [WorkerProcess(self._rewards, self._roots)]
                self._workers += free
            task = waiting.popleft()
            worker = free.pop()
            answer = vars(answers[task.answer]) | {"columns": dict(answers[task.answer].columns)}
            question = {"reward": task.reward, "answer": answer}
            worker.ask(task, question, ANSWERS + self._specs[task.reward].timeout)

    def _received(self) -> list[tuple[_Task, dict[str, Any]]]:
        """Wait for workers, and return what they reply. One that has ended or is stuck is removed."""
        busy = {worker.descriptors[0]: worker for worker in self._workers if worker.task is not None}
        unsent = {to: worker for worker in busy.values() if (to := worker.descriptors[1]) is not None}
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        for descriptor in unsent:
            poll.register(descriptor, select.POLLOUT)
        first = min(worker.deadline for worker in busy.values())
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, first - time.monotonic()) * 1000)}
        for descriptor in unsent.keys() & ready:
            unsent[descriptor].send()
        received = []
        for descriptor, worker in busy.items():
            reply: dict[str, Any] | None = None
            if descriptor in ready:
                try:
                    reply = worker.reply()
                except EOFError:
                    reply = {"problem": "lost the process that scores it", "again": True, "gone": True}
            elif time.monotonic() >= worker.deadline:
                reply = {"problem": "has a process that does not answer", "again": True, "gone": True}
            if reply is not None:
                received.append((worker.task, reply))
                if "gone" in reply:
                    self._workers.remove(worker)
                    worker.close()
                worker.task = None
        return received


def weighted(specs: Sequence[RewardSpec], scores: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the weighted sum of each answer's rewards; NaN if one of them is NaN.

    Raises InputError if a sum is too large for a float.
    """
    totals = []
    for score in scores:
        total = float(sum(spec.weight * score[spec.title] for spec in specs))
        if not math.isfinite(total) and not any(map(math.isnan, score.values())):
            shown = ", ".join(f"{name} {value:g}" for name, value in score.items())
            raise InputError(
                f"the sum of an answer's rewards is {total} ({shown})", "rewards", "lower their weights"
            )
        totals.append(total)
    return totals


def _place(failure: RewardFailure) -> str:
    return f"prompt {failure.prompt_number} (step {failure.step}, answer {failure.k})"

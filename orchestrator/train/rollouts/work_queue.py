"""The queue between the ranks, which ask for answers, and the rollout workers, which generate them.

The controller's process has it, so that it lasts as long as the workers do. A unit of work is some prompts. Its answers
are a pure function of the weights and of the numbers of its answers, so it does not matter which worker generates them,
nor whether two do. If a worker is lost, another one gets its unit.

Teacher workers get their work from it too. A unit is then a part of the samples, whose logits the worker stores, and
the answer is empty. See `orchestrator.train.distillation.worker_logits`.

Messages have the form of `orchestrator.checkpoint.snapshot_server`. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.connections import Connections
from orchestrator.checkpoint.snapshot_server import answer_all, listen, receive
from orchestrator.train.task import Task

TIMEOUT = 60.0
"""Seconds for the queue to answer, and for a weight server."""
POLL_SECONDS = 1.0
"""Seconds that the queue waits for something new before it answers with nothing."""


@dataclass
class _Unit:
    """A unit of work.

    Attributes:
        text: what to generate.
        rank: the connection of the rank that asked for it.
        index: its place among the units of that call.
        is_ahead: whether its rank trains meanwhile. Units that ranks wait for go first.
        asked_at: the monotonic time at which it was asked for.
        answers: the answers as text; None before they are there.
        taken_after, finished_after: the seconds from asking until a worker took it, the last one if several did, and
            until the answers.
        worker: the rollout worker that generates them, empty without one, and the number of its connection.
    """

    text: str
    rank: int
    index: int
    is_ahead: bool
    asked_at: float
    answers: str | None = None
    taken_after: float = 0.0
    finished_after: float = 0.0
    worker: tuple[str, int] = ("", 0)


class RolloutQueue:
    """The units of the latest attempt of a run. Methods are thread-safe.

    Attributes:
        token: authenticates its clients.
        address: where it answers.
        servers: {"node", "address"} of the servers that ranks send their next weights to.
        done: how many units of work were finished.
        is_finished: whether the ranks have said that they need no further units.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self.servers: Sequence[dict[str, str]] = ()
        self.done = 0
        self.is_finished = False
        self._attempt = 0
        self._units: dict[str, _Unit] = {}
        """Those whose answers were not collected yet, in the order in which they were asked for."""
        self._met: dict[str, set[int]] = {}
        """The ranks that have all answers of a call, by its name. Only the last two calls are kept."""
        self._changed = threading.Condition()
        """Guards all of it. Notified of new units and answers."""
        self._connected = 0
        """How many connections there were."""
        self._closed = False
        self._server = listen(host, 0, self._serve)
        self.address = "{}:{}".format(*self._server.server_address[:2])

    def begin(self, attempt: int) -> None:
        """Forget the units of earlier attempts, whose weights no server keeps, and refuse further ones."""
        with self._changed:
            if attempt > self._attempt:
                self._attempt = attempt
                self._units = {}
                self._met = {}
                self._changed.notify_all()

    def forget(self, worker: str) -> None:
        """Give the unit of a rollout worker to another one. A lost machine does not end its connections."""
        self._release(lambda each: each[0] == worker)

    def _release(self, has_gone: Callable[[tuple[str, int]], bool]) -> None:
        with self._changed:
            for unit in self._units.values():
                if has_gone(unit.worker):
                    unit.worker = ("", 0)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop answering."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        with self._changed:
            number = self._connected = self._connected + 1
        try:
            answer_all(connection, self.token, lambda request: self._answer(connection, request, number))
        finally:
            self._release(lambda each: each[1] == number)
            with self._changed:  # nobody collects what a rank asked for that has ended
                self._units = {name: unit for name, unit in self._units.items() if unit.rank != number}

    def _answer(self, connection: socket.socket, request: dict[str, Any], number: int) -> tuple[Any, ...]:
        """Carry out a request of a connection. Return the answer, and the bytes that follow it."""
        content = bytes(receive(connection, memoryview(bytearray(request["size"]))))
        match request["do"]:
            case "servers":
                return {}, json.dumps(list(self.servers)).encode()
            case "ask":
                return (self._ask(request, json.loads(content), number),)
            case "collect":
                return self._collect(json.loads(content))
            case "meet":
                return (self._meet(request),)
            case "finish":
                return (self._finish(request["attempt"]),)
            case "take":
                unit = self._take((request["worker"], number))
                return {}, json.dumps(unit).encode()
            case "give":
                return (self._give(request["name"], content.decode()),)
            case "wanted":
                return ({"wanted": self._is_wanted(request["name"])},)
        return ({"error": "malformed"},)

    def _ask(self, request: dict[str, Any], units: dict[str, str], rank: int) -> dict[str, Any]:
        attempt = request["attempt"]
        now = time.monotonic()
        with self._changed:
            if attempt < self._attempt:
                return {"error": "replaced"}
        self.begin(attempt)  # nobody collects what the ranks of earlier attempts asked for
        with self._changed:
            self.is_finished = False
            numbered = enumerate(units.items())
            self._units |= {
                name: _Unit(text, rank, index, is_ahead=request["ahead"], asked_at=now)
                for index, (name, text) in numbered
            }
            self._changed.notify_all()
        return {}

    def _collect(self, names: list[str]) -> tuple[Any, ...]:
        def ready_results() -> dict[str, list[Any]]:
            units = {name: self._units[name] for name in names}
            ready = {name: unit for name, unit in units.items() if unit.answers is not None}
            return {
                name: [unit.answers, unit.taken_after, unit.finished_after] for name, unit in ready.items()
            }

        with self._changed:
            if not self._units.keys() >= set(names):
                return ({"error": "replaced"},)
            self._changed.wait_for(
                lambda: self._closed or not self._units.keys() >= set(names) or ready_results(), POLL_SECONDS
            )
            if not self._units.keys() >= set(names):
                return ({"error": "replaced"},)
            answers = ready_results()
            for name in answers:
                del self._units[name]
            return {}, json.dumps(answers).encode()

    def _meet(self, request: dict[str, Any]) -> dict[str, Any]:
        """Note that a rank has its answers of a call. Return whether all ranks have theirs, within POLL_SECONDS."""
        with self._changed:
            if request["attempt"] < self._attempt:
                return {"error": "replaced"}
            ranks = self._met.setdefault(request["call"], set())
            ranks.add(request["rank"])
            # A rank may still be in the call before, but not in an earlier one: this one would not have begun.
            self._met = dict(list(self._met.items())[-2:])
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or len(ranks) >= request["world"] or request["attempt"] < self._attempt,
                POLL_SECONDS,
            )
            return {"all": len(ranks) >= request["world"]}

    def _finish(self, attempt: int) -> dict[str, Any]:
        with self._changed:
            if attempt < self._attempt:
                return {"error": "replaced"}
            self.is_finished = True
        return {}

    def _take(self, worker: tuple[str, int]) -> list[Any] | None:
        """Return the name and the text of a unit; None if there is nothing to do."""
        with self._changed:
            chosen = self._changed.wait_for(lambda: self._closed or self._first(), POLL_SECONDS)
            if not isinstance(chosen, str):
                return None
            unit = self._units[chosen]
            unit.worker = worker
            unit.taken_after = time.monotonic() - unit.asked_at
            return [chosen, unit.text]

    def _first(self) -> str | None:
        """Return the name of the next unit that nobody generates. Ranks are served in turn."""
        units = self._units.items()
        free = [name for name, unit in units if unit.answers is None and not unit.worker[1]]
        return min(free, key=lambda name: (self._units[name].is_ahead, self._units[name].index), default=None)

    def _give(self, name: str, answers: str) -> dict[str, Any]:
        with self._changed:
            # It is gone if its attempt has ended, or if another worker was faster.
            if (unit := self._units.get(name)) is not None:
                if unit.answers is None:
                    self.done += 1
                    unit.finished_after = time.monotonic() - unit.asked_at
                unit.answers = answers
                self._changed.notify_all()
        return {}

    def _is_wanted(self, name: str) -> bool:
        with self._changed:
            unit = self._units.get(name)
            return unit is not None and unit.answers is None


def worker_name(node: str, pid: int) -> str:
    """Return the name of a rollout worker in the queue.

    Args:
        node: the worker's node.
        pid: its process.
    """
    return f"{node}:{pid}"


class Work(NamedTuple):
    """A unit of work as a rollout worker gets it.

    Attributes:
        name: its name in the queue.
        content: what to generate, as plain data.
    """

    name: str
    content: dict[str, Any]


class UnitResult(NamedTuple):
    """What a rank gets for a unit of work.

    Attributes:
        answers: as plain data; None if the weights generate none.
        taken_after, finished_after: the seconds from asking until a rollout worker took the unit, and until the
            answers.
    """

    answers: Any
    taken_after: float
    finished_after: float


class QueueClient:
    """A connection of a rank or a rollout worker to a queue. One thread uses it."""

    def __init__(self, address: str, token: str, worker: str = "") -> None:
        """`worker` is the name of the rollout worker, see `worker_name`."""
        self._address = address
        self._worker = worker
        self._connections = Connections(token, TIMEOUT)

    def close(self) -> None:
        """Close the connection."""
        self._connections.close()

    def servers(self) -> list[dict[str, str]]:
        """Return {"node", "address"} of the servers to send weights to."""
        return list(json.loads(self._do("servers")["bytes"]))

    def ask(self, attempt: int, units: dict[str, dict[str, Any]], is_ahead: bool = False) -> None:
        """Ask for units of work, which `collect` waits for.

        Args:
            attempt: the attempt of the run. Units of earlier ones are forgotten.
            units: by name, what to generate, as plain data.
            is_ahead: whether this rank goes on meanwhile. Units that ranks wait for are generated first.

        Raises OSError if the queue is gone, or a later attempt of the run has begun.
        """
        texts = {name: json.dumps(content) for name, content in units.items()}
        self._do("ask", json.dumps(texts).encode(), attempt=attempt, ahead=is_ahead)

    def collect(
        self, names: Sequence[str], progressed: Callable[[], object] = lambda: None
    ) -> dict[str, UnitResult]:
        """Wait for units of work, and return what was made of them by name.

        The wait has no limit here: the controller ends ranks that wait while no rollout worker makes progress.

        Args:
            names: the names of units that were asked for.
            progressed: called after each unit.

        Raises:
            OSError: the queue is gone, or a later attempt of the run has begun.
            ConnectionError: the queue forgot the units, because it lost the connection to this rank.
        """
        results: dict[str, UnitResult] = {}
        while missing := [name for name in names if name not in results]:
            try:
                answer = json.loads(self._do("collect", json.dumps(missing).encode())["bytes"])
            except PermissionError:
                cause = "a later attempt of the run began, or the connection was lost"
                # `error_kind` knows the first words: the program is not at fault.
                text = f"Connection reset: the queue of rollouts forgot what this rank asked for, because {cause}"
                raise ConnectionError(text) from None
            results |= {name: UnitResult(json.loads(text), *times) for name, (text, *times) in answer.items()}
            if answer:
                progressed()
        return results

    def meet(self, attempt: int, call: str, rank: int, world: int) -> None:
        """Wait until all ranks have the answers of a call. All ranks make the same calls in the same order.

        Ranks would otherwise wait for each other in a collective, which has a time limit of its own. As in `answers`,
        the controller limits this wait.

        Args:
            attempt: the attempt of the run.
            call: the name of the call.
            rank: this rank.
            world: the number of ranks.

        Raises OSError if the queue is gone, or a later attempt of the run has begun.
        """
        while not self._do("meet", attempt=attempt, call=call, rank=rank, world=world)["all"]:
            pass

    def finish(self, attempt: int) -> None:
        """Say that the ranks need no further units, unless they ask again. Raises OSError as `ask`."""
        self._do("finish", attempt=attempt)

    def take(self) -> Work | None:
        """Return a unit of work, or None if the queue gets no unit within POLL_SECONDS."""
        work = json.loads(self._do("take", worker=self._worker)["bytes"])
        if work is None:
            return None
        name, text = work
        return Work(name, json.loads(text))

    def give(self, name: str, answers: Any) -> None:
        """Hand in the answers of a unit, as plain data.

        Args:
            name: name of the unit.
            answers: to its prompts.
        """
        self._do("give", json.dumps(answers).encode(), name=name)

    def is_wanted(self, name: str) -> bool:
        """Return whether somebody still waits for the answers of a unit."""
        return bool(self._do("wanted", name=name)["wanted"])

    def _do(self, do: str, content: bytes = b"", **fields: Any) -> dict[str, Any]:
        return self._connections.ask(self._address, {"do": do, **fields}, content)


def work_until_stopped(task: Task, context: WorkerContext, do: Callable[[QueueClient, Work], bool]) -> int:
    """Do units of work until the controller stops this worker. Return how many.

    Injected faults count units as steps.

    Args:
        task: the task of the worker.
        context: its connection to the controller. It counts as waiting until `do` says otherwise.
        do: does a unit and hands in its answers; returns False if nobody waits for them any more.

    Raises OSError if the queue is gone.
    """
    address = task.rollout_address
    assert address is not None
    queue = QueueClient(address.address, address.token, worker_name(context.rank_info.node, os.getpid()))
    units_done = 0
    while not context.stop_requested():
        context.set_waiting(True)
        work = queue.take()
        if work is None:
            continue
        for fault in task.parsed_faults:
            fault.apply(0, 1, units_done + 1, task.attempt)
        if do(queue, work):
            units_done += 1
            context.progressed()
    queue.close()
    return units_done

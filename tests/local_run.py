"""Whole runs on gangs of local processes: the controller in this process, the ranks real, and no Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lasting_gang import lasting_gang
from prepared import prepare_here
from scripted import SnapshotServers

from cluster.workers.cluster import Cluster
from cluster.workers.gang import Bundle, Gang, GangStatus
from cluster.workers.machine import Offer
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.export.hugging_face import write
from orchestrator.planner.trace import background_tracer
from orchestrator.resolve.commit_model import CommitModel
from orchestrator.storage.run_directory import RunDir


class LocalGang:
    """A gang of local processes that has room for so many workers in each attempt; the last number stays."""

    def __init__(self, rooms: list[int]) -> None:
        self._rooms, self._running, self._ranks = rooms, False, lasting_gang()

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        return self._rooms[0]

    def start(self, *arguments: Any, **more: Any) -> None:
        """See `Gang.start`."""
        self._ranks.start(*arguments, **more)
        self._running = True

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`."""

    def occupied_workers(self) -> int:
        """See `Gang.occupied_workers`."""
        return 0

    def ready(self) -> int:
        """See `Gang.ready`."""
        return self._ranks.ready()

    def lost_nodes(self) -> Set[str]:
        """See `Gang.lost_nodes`."""
        return self._ranks.lost_nodes()

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        return self._ranks.poll(saved, wait)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self._ranks.request_stop()

    def ask_profile(self, asked: dict[str, Any]) -> None:
        """See `Gang.ask_profile`."""
        self._ranks.ask_profile(asked)

    def output(self, rank: int) -> str:
        """See `Gang.output`."""
        return self._ranks.output(rank)

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`."""
        self._ranks.print_stacks()

    def stop(self) -> None:
        """See `Gang.stop`."""
        self._ranks.stop()
        if self._running and len(self._rooms) > 1:
            del self._rooms[0]
        self._running = False

    def close(self) -> None:
        """See `Gang.close`."""
        self._ranks.close()


def with_evaluator(rooms: list[int]) -> Callable[[], Gang]:
    """Makes gangs of a run: the first is that of the ranks, in each attempt with so much room, which an evaluation
    beside them takes its own from; the others evaluate."""
    made: list[Gang] = []

    def gang() -> Gang:
        made.append(lasting_gang("evaluator") if made else LocalGang(rooms))
        return made[-1]

    return gang


def with_rollout_workers(rooms: list[int], faults: tuple[str, ...] = ()) -> Callable[[], Gang]:
    """Makes gangs of a run: the first is that of the ranks, in each attempt with so much room, which rollout workers
    beside them take their own from; the others are of one rollout worker each. Each of `faults` is for one of those, in
    turn; its step counts units of work."""
    made: list[Gang] = []
    left = list(faults)

    def gang() -> Gang:
        given = (left.pop(0),) if made and left else ()
        made.append(RolloutGang(given) if made else LocalGang(rooms))
        return made[-1]

    return gang


class RolloutGang(LocalGang):
    """The gang of a rollout worker with injected faults."""

    used: ClassVar[set[str]] = set()
    """The names of lasting gangs that are in use."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__([1])
        self._name = next(name for n in range(9) if (name := f"rollouts-{n}") not in self.used)
        self.used.add(self._name)
        self._ranks, self._faults = lasting_gang(self._name), faults

    def start(self, *arguments: Any, **more: Any) -> None:
        """See `Gang.start`."""
        world, bundle, target, config = arguments
        super().start(world, bundle, target, {**config, "faults": self._faults}, **more)

    def close(self) -> None:
        """See `Gang.close`."""
        super().close()
        self.used.discard(self._name)


def drive_here(
    document: dict[str, Any],
    run: str,
    cache: Path,
    *,
    gang: Callable[[], Gang] | None = None,
    faults: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run a job that exports nothing, with its data prepared in `cache`. Returns the summary."""
    return controller_here(document, run, cache, gang=gang, faults=faults).drive()


def in_a_copy(function: Any, *arguments: Any) -> Any:
    """Call a function with copies of its arguments, which on Ray are sent to another process."""
    return function(*pickle.loads(pickle.dumps(arguments)))


class TracedHere:
    """A trace of layouts before a start, in this process. No other task may be run: nothing is exported."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        if function is not background_tracer.answer:
            pytest.fail("nothing is exported")
        self._result = in_a_copy(function, *arguments)

    def done(self) -> bool:
        """See `RemoteTask.done`."""
        return True

    def result(self) -> Any:
        """See `RemoteTask.result`."""
        return self._result

    def cancel(self) -> None:
        """See `RemoteTask.cancel`."""


def controller_here(
    document: dict[str, Any],
    run: str,
    cache: Path,
    *,
    gang: Callable[[], Gang] | None = None,
    faults: tuple[str, ...] = (),
    until: int | None = None,
) -> Controller:
    """The controller of such a run."""
    document["data"]["cache"] = str(cache)
    spec = parse(document)
    prepare_here(spec, str(cache))
    place = RunDir(run)
    place.create()
    cluster = Cluster(
        gang=gang or (lambda: LocalGang([2])),
        offer=lambda bundle, most: Offer(8e9),
        run_task=TracedHere,
        services=SnapshotServers,
        call=in_a_copy,
    )
    return Controller(spec, place, until, cluster, faults)


def export_here(made: CommitModel, folder: Path) -> float | None:
    """Export the model of a commit. Returns the largest difference of its logits from those of transformers."""
    return write(
        made.tokens,
        made.workload,
        made.read,
        str(folder),
        spec=made.spec.workload,
        data=made.spec.data,
        seed=made.spec.seed,
        own_code=made.spec.own_code,
    )

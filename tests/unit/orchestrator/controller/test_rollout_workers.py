"""Where rollout workers run, and which nodes get weights, on a cluster without processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gang import Attempt, FakeGang

from cluster.workers.device_limits import CPU
from cluster.workers.gang import Bundle, Cause, GangStatus, RankStatus
from orchestrator.config.resources import Workers
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.health import FIRST_STEP, STRIKES, excluded
from orchestrator.controller.rollout_changes import RolloutChanges
from orchestrator.controller.rollout_workers import RolloutWorkers

NODES = ("a", "b", "c", "d")


class Node(FakeGang):
    """A gang of one rank, on the first node that it may use."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(self._beats)
        self._hosts = hosts
        self.avoided: list[Set[str]] = []
        self.now: dict[str, Any] = {}
        self.at = time.monotonic()

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        self.avoided.append(avoid)

    def start(self, *arguments: Any, **more: Any) -> None:
        self.avoided.append(more["avoid"])
        super().start(*arguments, **more)

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        return super().poll(saved, wait) if self._attempt is not None else GangStatus()

    def occupied_workers(self) -> int:
        return 1

    def _beats(self, attempt: Attempt) -> Iterator[GangStatus]:
        node = next(name for name in NODES if name not in attempt.avoid)
        while True:
            rank = RankStatus(0, node, 7, **{"state": "running", "last_heartbeat": self.at, **self.now})
            yield GangStatus((rank,), at=self.at)


class Hosts:
    """Four nodes with a server of weights on each."""

    def __init__(self) -> None:
        self.gangs: list[Node] = []
        self.serves = False

    def gang(self) -> Node:
        self.gangs.append(Node(self))
        return self.gangs[-1]

    def ensure_running(self) -> list[dict[str, str]]:
        self.serves = True
        return [{"node": node, "address": f"{node}:1"} for node in NODES]

    def stop(self) -> None:
        self.serves = False


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def workers(hosts: Hosts) -> Iterator[RolloutWorkers]:
    cluster: Any = SimpleNamespace(
        gang=hosts.gang, services=lambda *_: hosts, host=lambda: "127.0.0.1", machines=lambda nodes: []
    )
    found = RolloutWorkers(cluster, "run", Workers(min=1, max=2), Bundle(), CPU, LimitSpec())
    begin(found)
    yield found
    found.close()


def begin(workers: RolloutWorkers, attempt: int = 1) -> None:
    workers.task_fields()
    task: Any = SimpleNamespace(attempt=attempt)
    task.for_rollout_worker = lambda: SimpleNamespace(to_json=dict)
    workers.begin(task)


def sent_to(workers: RolloutWorkers) -> list[str]:
    assert workers._queue is not None
    return [server["node"] for server in workers._queue.servers]


def test_they_leave_nodes_that_are_to_be_avoided(workers: RolloutWorkers, hosts: Hosts) -> None:
    workers.follow(1)
    assert [rank.node for rank in workers.running] == ["a"]
    assert (workers.occupied_workers(), workers.occupied_workers({"a"}), workers.occupied_workers({"b"})) == (
        1,
        0,
        1,
    )
    workers.follow(1, avoid={"a"})
    assert [rank.node for rank in workers.running] == ["b"]
    assert hosts.gangs[1].avoided == [{"a"}, {"a"}]


def test_events_tell_how_many_run_and_what_their_machines_cost(
    workers: RolloutWorkers, hosts: Hosts, tmp_path: Path
) -> None:
    table = tmp_path / "prices.csv"
    table.write_text("machine,market,zone,usd_per_hour\nm,spot,,0.5\n")
    changes = RolloutChanges(
        LimitSpec(prices=str(table)),
        lambda nodes: [{"node": node, "machine": "m", "market": "spot", "zone": ""} for node in nodes],
    )
    workers.changes = changes
    assert workers.take_news({"a"}, "train") == []
    workers.follow(1, avoid={"a"})
    assert workers.take_news({"a"}, "start") == []
    workers.follow(1, avoid={"a"})
    assert workers.take_news({"a"}, "train") == ["1 rollout worker runs"]
    (first,) = changes.take(is_start=False)
    assert (first["workers"], first["usd_per_hour"]) == (1, 0.5)
    assert workers.take_news(set(), "wait") == [], "the ranks are gone for a moment, and their machines stay"
    assert changes.take(is_start=False) == []
    (again,) = changes.take(is_start=True)
    assert again == first | {"time": again["time"]}
    workers.follow(0)
    assert workers.take_news({"a"}, "train") == ["0 rollout workers run"]
    (last,) = changes.take(is_start=True)
    assert (last["workers"], last["machines"], last["usd_per_hour"]) == (0, [], None)


def test_weights_go_to_two_nodes_and_to_none_that_is_lost(workers: RolloutWorkers, hosts: Hosts) -> None:
    workers.follow(1, rank_nodes={"c", "d"})
    assert sent_to(workers) == ["a", "c"]
    workers.follow(0, rank_nodes={"c", "d"}, lost={"a"})
    assert sent_to(workers) == ["c", "d"]
    workers.follow(0, avoid={"c"}, rank_nodes={"d"}, lost={"a"})
    assert sent_to(workers) == ["d", "b"]
    workers.follow(0, lost=frozenset(NODES))
    assert sent_to(workers) == []
    workers.follow(1)
    hosts.gangs[-1].now = {"state": "dead", "error": "gone", "cause": Cause("lost", name="place")}
    workers.look()
    assert sent_to(workers) == ["b", "c"]
    workers.follow(1)
    assert sent_to(workers) == ["a", "b"]


def test_failures_strike_a_node_once_each_and_weights_that_are_gone_do_not(
    workers: RolloutWorkers, hosts: Hosts
) -> None:
    last: list[Any] = []
    for name in ("ValueError", "NoWeights", "ValueError", "ValueError"):
        workers.follow(1)
        gang = hosts.gangs[-1]
        gang.at += len(hosts.gangs)
        gang.now = {"state": "failed", "error": "no", "cause": Cause("raised", name=name)}
        last = list(workers.look())
        assert len(last) == 1
    now = last[0].time
    found = workers.with_failures(last, now - 1000)  # the last one ended the gang, too
    assert len(found) == STRIKES
    assert excluded(found, now) == {"a"}
    assert workers.with_failures((), now + 1) == []


def test_one_that_hangs_after_its_first_token_ends_before_the_gang(
    workers: RolloutWorkers, hosts: Hosts
) -> None:
    workers.follow(1)
    (gang,) = hosts.gangs
    gang.now = {"evaluated_batches": 1}
    assert workers.look() == ()
    gang.at += FIRST_STEP / 2  # it may compile
    assert workers.look() == ()
    gang.now = {"evaluated_batches": 2}
    gang.at += 1
    assert workers.look() == ()
    gang.at += 0.9 * FIRST_STEP  # less than three times its longest wait for a token
    assert workers.look() == ()
    gang.at += FIRST_STEP
    (failure,) = workers.look()
    assert failure.cause.end == "still"
    assert workers.moved == gang.at


def test_it_gives_everything_back_and_forgets_the_work(workers: RolloutWorkers, hosts: Hosts) -> None:
    workers.follow(1)
    workers.give_back()
    assert (workers.occupied_workers(), workers.running, sent_to(workers), hosts.serves) == (0, (), [], False)
    workers.follow(1)
    assert workers.occupied_workers() == 0
    begin(workers, attempt=2)
    workers.follow(1)
    assert workers.occupied_workers() == 1
    assert hosts.serves


def test_teacher_workers_live_in_the_same_way_without_servers_of_weights(hosts: Hosts) -> None:
    def no_services(*_: Any) -> Any:
        raise AssertionError("a teacher's weights never change")

    cluster: Any = SimpleNamespace(
        gang=hosts.gang, services=no_services, host=lambda: "127.0.0.1", machines=lambda nodes: []
    )
    found = RolloutWorkers(cluster, "run", Workers(min=1, max=2), Bundle(), CPU, LimitSpec(), kind="teacher")
    begin(found)
    found.follow(1)
    assert [rank.node for rank in found.running] == ["a"]
    assert found.take_news(set(), "train") == ["1 teacher worker runs"]
    hosts.gangs[0].now = {"state": "dead", "error": "process ended", "cause": Cause("exited", -9)}
    hosts.gangs[0].at = time.monotonic()
    (failure,) = found.look()
    assert failure.where == "teacher worker 1 on a"
    (line,) = found.take_news(set(), "train")
    assert line.endswith("its logits are computed again")
    assert not found.are_finished
    found.leave({"a"})
    found.give_back()
    found.close()

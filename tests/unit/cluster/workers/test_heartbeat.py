"""What a gang hears of its ranks, and who is not listened to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.workers.clock import wall
from cluster.workers.gang import Cause, GangStatus, RankStatus
from cluster.workers.hang_report import HangReport
from cluster.workers.heartbeat import HeartbeatServer, _line, _send
from cluster.workers.rank_process import heartbeat_interval


def expect(server: HeartbeatServer) -> str:
    return server.expect(["local", "local"])


class Client:
    """A rank's end of a connection."""

    def __init__(self, server: HeartbeatServer, token: str, rank: int) -> None:
        host, _, port = server.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self._lines = self.socket.makefile("r")
        self.send(token=token, rank=rank, pid=100 + rank)

    def send(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wanted: str) -> dict[str, Any]:
        """The next message that has this word."""
        while line := self._lines.readline():
            if wanted in (message := json.loads(line)):
                return dict(message)
        raise AssertionError(f"hung up before {wanted}")

    def is_disconnected(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return all("saved" in json.loads(line) for line in self._lines)
        return True


def until(server: HeartbeatServer, seen: Callable[[GangStatus], bool]) -> GangStatus:
    deadline = time.monotonic() + 10
    while not seen(status := server.poll(0, 0.01)):
        assert time.monotonic() < deadline, status
    return status


def test_a_connection_that_ends_is_a_death_and_is_news_at_once(server: HeartbeatServer) -> None:
    token = expect(server)
    first, second = Client(server, token, 0), Client(server, token, 1)
    first.send(state="running", step=3)
    second.send(state="running", step=3)
    until(server, lambda status: [r.state for r in status.ranks] == ["running", "running"])
    server.poll(0, 0.0)
    second.socket.close()
    second._lines.close()
    began = time.monotonic()
    status = server.poll(0, 10.0)
    assert time.monotonic() - began < 9
    assert [(r.state, r.step, r.pid) for r in status.ranks] == [("running", 3, 100), ("dead", 3, 101)]
    assert abs(time.monotonic() - status.ranks[1].failed_at) < 9


def test_who_has_ended_may_hang_up(server: HeartbeatServer) -> None:
    client = Client(server, expect(server), 0)
    client.send(state="done", ended=True, result={"step": 4})
    assert client.receive("acknowledged") == {"acknowledged": True}
    client.socket.close()
    client._lines.close()
    time.sleep(0.05)
    assert until(server, lambda status: status.ranks[0].state == "done").ranks[0].result == {"step": 4}
    assert server.poll(0, 0.05).ranks[0].state == "done"


def test_all_ranks_are_told_the_port_whoever_comes_first(server: HeartbeatServer) -> None:
    token = expect(server)
    early = Client(server, token, 1)
    early.send(state="running")
    until(server, lambda status: status.ranks[1].state == "running")
    zero = Client(server, token, 0)
    zero.send(state="running", port=4711)
    assert early.receive("port") == {"port": 4711}
    assert zero.receive("port") == {"port": 4711}
    assert Client(server, token, 1).receive("port") == {"port": 4711}


@pytest.mark.parametrize("token", ["", "wrong", None])
def test_a_stranger_is_disconnected(server: HeartbeatServer, token: Any) -> None:
    expect(server)
    stranger = Client(server, token, 0)
    stranger.send(state="failed", error="lies")
    assert stranger.is_disconnected()
    assert [r.state for r in server.poll(0, 0.0).ranks] == ["starting", "starting"]


def test_what_is_no_message_is_disconnected(server: HeartbeatServer) -> None:
    client = Client(server, expect(server), 0)
    client.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert client.is_disconnected()


def test_ranks_of_an_attempt_that_is_over_say_nothing_any_more(server: HeartbeatServer) -> None:
    old = Client(server, expect(server), 0)
    old.send(state="running", rows=[{"step": 1}])
    until(server, lambda status: status.ranks[0].state == "running")
    expect(server)
    old.send(state="running", rows=[{"step": 2}])
    assert old.is_disconnected()
    status = server.poll(0, 0.0)
    assert (status.rows, [r.state for r in status.ranks]) == ((), ["starting", "starting"])


def test_ranks_of_an_attempt_that_is_over_are_hung_up_on_though_they_say_nothing(
    server: HeartbeatServer,
) -> None:
    """Behind a cut network they hear of it once it is mended, and end themselves."""
    old = Client(server, expect(server), 0)
    until(server, lambda status: status.ranks[0].pid == 100)
    expect(server)
    assert old.is_disconnected()


def test_rows_come_once_and_in_order_and_what_is_saved_is_told(server: HeartbeatServer) -> None:
    client = Client(server, expect(server), 0)
    for step in range(100):
        client.send(state="running", step=step, rows=[{"step": step}])
    rows: list[Any] = []
    while len(rows) < 100:
        rows += server.poll(len(rows), 0.01).rows
    assert rows == [{"step": step} for step in range(100)]
    assert server.poll(100, 0.0).rows == ()
    server.broadcast({"saved": 100})
    while client.receive("saved") != {"saved": 100}:
        pass


def test_the_largest_gap_between_beats_is_known_and_fades_with_time(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many heartbeats come meanwhile: a large gang sends hundreds a second."""
    client = Client(server, expect(server), 0)
    client.send(state="running")
    until(server, lambda status: status.ranks[0].state == "running")
    time.sleep(0.3)
    client.send(state="running", step=1)
    gap = until(server, lambda status: status.ranks[0].step == 1).gap
    assert gap >= 0.3
    for step in range(2, 100):
        client.send(state="running", step=step)
    assert until(server, lambda status: status.ranks[0].step == 99).gap > gap / 2
    monkeypatch.setattr("cluster.workers.heartbeat.GAP_HALF_LIFE", 0.01)

    def has_faded(status: GangStatus) -> bool:
        client.send(state="running", step=100)
        return status.gap < gap / 2

    until(server, has_faded)


def test_an_answer_belongs_to_one_question(server: HeartbeatServer) -> None:
    """A gang that went on after it was asked may be asked again."""
    client = Client(server, expect(server), 0)
    client.send(state="running", hang=dataclasses.asdict(HangReport(frame="f (a.py:1)")))
    asked = until(server, lambda status: status.ranks[0].hang is not None)
    assert asked.ranks[0].hang == HangReport(frame="f (a.py:1)")
    server.ask_what_hangs()
    assert server.poll(0, 0.0).ranks[0].hang is None
    assert client.receive("hangs") == {"hangs": True}


def test_rows_that_come_while_a_death_is_looked_into_are_not_lost(server: HeartbeatServer) -> None:
    token = expect(server)
    first, second = Client(server, token, 0), Client(server, token, 1)
    first.send(state="running", step=1, rows=[{"step": 1}])
    second.send(state="running", step=1)
    rows: list[Any] = []
    until(
        server,
        lambda status: bool(rows.extend(status.rows)) or all(r.state == "running" for r in status.ranks),
    )
    second.socket.close()
    second._lines.close()

    def cause(rank: RankStatus) -> tuple[Cause, str]:
        first.send(state="running", step=2, rows=[{"step": 2}])
        time.sleep(0.1)
        return Cause("lost"), f"rank {rank.rank} was pulled"

    deadline = time.monotonic() + 10
    while len(rows) < 2:
        rows += server.poll(0, 0.01, cause).rows
        assert time.monotonic() < deadline, rows
    assert rows == [{"step": 1}, {"step": 2}]
    assert server.poll(0, 0.0).ranks[1].error == "rank 1 was pulled"


def test_ranks_are_spoken_to_though_nobody_looks(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks may wait for storage for longer than a rank waits for a word."""
    monkeypatch.setattr("cluster.workers.heartbeat.PING_INTERVAL", 0.05)
    client = Client(server, expect(server), 0)
    server.poll(7, 0.0)
    for _ in range(3):
        while client.receive("saved") != {"saved": 7}:
            pass
    expect(server)
    assert Client(server, expect(server), 0).receive("saved") == {"saved": 0}


def test_clocks_of_hosts_are_not_compared(server: HeartbeatServer) -> None:
    """A rank whose clock is a year ahead, and its monotonic one too: it says how long ago things were."""
    year = 365 * 86400.0
    client = Client(server, expect(server), 0)
    ahead = wall() + year
    told = {"cause": {"end": "raised", "name": "OSError"}, "failed_at": year, "failed_ago": 3.0}
    rows = [{"step": 1, "time": ahead - 5.0}, {"step": 2}]
    began = time.monotonic()
    client.send(state="failed", error="why", ended=True, now=ahead, rows=rows, **told)
    status = until(server, lambda status: status.ranks[0].state == "failed")
    assert status.ranks[0].cause == Cause("raised", name="OSError")
    assert began - 3.5 <= status.ranks[0].failed_at <= time.monotonic() - 3.0
    assert [row.get("time", 0.0) for row in status.rows] == [pytest.approx(wall() - 5.0, abs=2.0), 0.0]


def test_a_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall()
    monkeypatch.setattr(time, "time", lambda: before + 1e6)
    assert 0.0 <= wall() - before < 5.0


def test_a_watcher_that_was_frozen_itself_takes_nobody_for_silent(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has heard what came meanwhile, no time has passed for it."""
    client = Client(server, expect(server), 0)
    client.send(state="running", step=1)
    until(server, lambda status: status.ranks[0].step == 1)
    frozen, thawed, behind = threading.Event(), threading.Event(), [0.0]
    select = server._selector.select

    def gate(timeout: float) -> Any:
        frozen.set()
        assert thawed.wait(10)
        return select(timeout)

    monkeypatch.setattr(
        "cluster.workers.heartbeat.time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + behind[0], sleep=time.sleep),
    )
    monkeypatch.setattr(server._selector, "select", gate)
    assert frozen.wait(10)
    behind[0] = 3600.0
    client.send(step=2)
    before = server.poll(0, 0.0)
    assert before.at - before.ranks[0].last_heartbeat < 60
    thawed.set()
    after = until(server, lambda status: status.at > before.at + 1800)
    assert after.ranks[0].step == 2
    assert after.at - after.ranks[0].last_heartbeat < 60


def test_readings_of_a_node_come_with_its_name_and_the_step(server: HeartbeatServer) -> None:
    client = Client(server, server.expect(["10.0.0.4", "10.0.0.5"]), 1)
    client.send(step=7, state="running", nodes=[{"cpu_utilization_percentage": 50.0}])
    [found] = until(server, lambda status: bool(status.nodes)).nodes
    assert abs(found.pop("time") - wall()) < 60
    assert found == {"node": "10.0.0.5", "step": 7, "values": {"cpu_utilization_percentage": 50.0}}
    assert server.poll(0, 0.0).nodes == ()


def test_a_thousand_ranks_that_connect_at_once_are_all_heard(server: HeartbeatServer) -> None:
    ranks = 1100
    token = server.expect(["local"] * ranks)
    clients = [Client(server, token, rank) for rank in range(ranks)]
    for client in clients:
        client.send(state="running")
    status = until(server, lambda seen: all(rank.state == "running" for rank in seen.ranks))
    assert [rank.pid for rank in status.ranks] == [100 + rank for rank in range(ranks)]
    for client in clients:
        client.socket.close()


def test_a_large_gang_beats_less_often_but_at_least_once_a_second() -> None:
    assert [heartbeat_interval(world) for world in (1, 100, 500, 1000, 16384)] == [0.1, 0.1, 0.5, 1.0, 1.0]


def test_nothing_follows_a_message_that_was_cut() -> None:
    """The connection of a rank that reads nothing is full at some point, mostly within a message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = socket.create_connection(listener.getsockname(), 10)
        connection, _ = listener.accept()
    with rank, connection:
        for number in range(20_000):
            _send(connection, _line({"saved": number, "text": "x" * 1000}))
        _send(connection, _line({"stop": True}))
        data = b""
        while part := rank.recv(1 << 20):
            data += part
    *lines, last = data.split(b"\n")
    assert [json.loads(line)["saved"] for line in lines] == list(range(len(lines)))
    assert last
    assert f'{{"saved": {len(lines)}'.encode().startswith(last[:10])

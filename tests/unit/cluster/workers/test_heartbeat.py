"""What a gang hears of its ranks, and who is not listened to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.workers.clock import wall
from cluster.workers.gang import Cause, GangStatus, RankStatus
from cluster.workers.heartbeat import HeartbeatServer


@pytest.fixture
def watch() -> Iterator[HeartbeatServer]:
    """Listens for two ranks."""
    found = HeartbeatServer("127.0.0.1")
    yield found
    found.close()


def expect(watch: HeartbeatServer) -> str:
    return watch.expect(["local", "local"])


class Caller:
    """A rank's end of a connection."""

    def __init__(self, watch: HeartbeatServer, token: str, rank: int) -> None:
        host, _, port = watch.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self._lines = self.socket.makefile("r")
        self.say(token=token, rank=rank, pid=100 + rank)

    def say(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, wanted: str) -> dict[str, Any]:
        """The next message that has this word."""
        while line := self._lines.readline():
            if wanted in (message := json.loads(line)):
                return dict(message)
        raise AssertionError(f"hung up before {wanted}")

    def is_hung_up_on(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return all("saved" in json.loads(line) for line in self._lines)
        return True


def until(watch: HeartbeatServer, seen: Callable[[GangStatus], bool]) -> GangStatus:
    deadline = time.monotonic() + 10
    while not seen(beat := watch.poll(0, 0.01)):
        assert time.monotonic() < deadline, beat
    return beat


def test_a_connection_that_ends_is_a_death_and_is_news_at_once(watch: HeartbeatServer) -> None:
    token = expect(watch)
    first, second = Caller(watch, token, 0), Caller(watch, token, 1)
    first.say(state="running", step=3)
    second.say(state="running", step=3)
    until(watch, lambda beat: [r.state for r in beat.ranks] == ["running", "running"])
    watch.poll(0, 0.0)
    second.socket.close()
    second._lines.close()
    began = time.monotonic()
    beat = watch.poll(0, 10.0)
    assert time.monotonic() - began < 5
    assert [(r.state, r.step, r.pid) for r in beat.ranks] == [("running", 3, 100), ("dead", 3, 101)]
    assert abs(time.monotonic() - beat.ranks[1].failed_at) < 5


def test_who_has_ended_may_hang_up(watch: HeartbeatServer) -> None:
    caller = Caller(watch, expect(watch), 0)
    caller.say(state="done", ended=True, result={"step": 4})
    assert caller.hear("bye") == {"bye": True}
    caller.socket.close()
    caller._lines.close()
    time.sleep(0.05)
    assert until(watch, lambda beat: beat.ranks[0].state == "done").ranks[0].result == {"step": 4}
    assert watch.poll(0, 0.05).ranks[0].state == "done"


def test_all_ranks_are_told_the_port_whoever_comes_first(watch: HeartbeatServer) -> None:
    token = expect(watch)
    early = Caller(watch, token, 1)
    early.say(state="running")
    until(watch, lambda beat: beat.ranks[1].state == "running")
    zero = Caller(watch, token, 0)
    zero.say(state="running", port=4711)
    assert early.hear("port") == {"port": 4711}
    assert zero.hear("port") == {"port": 4711}
    assert Caller(watch, token, 1).hear("port") == {"port": 4711}


@pytest.mark.parametrize("token", ["", "wrong", None])
def test_a_stranger_is_hung_up_on(watch: HeartbeatServer, token: Any) -> None:
    expect(watch)
    stranger = Caller(watch, token, 0)
    stranger.say(state="failed", error="lies")
    assert stranger.is_hung_up_on()
    assert [r.state for r in watch.poll(0, 0.0).ranks] == ["starting", "starting"]


def test_what_is_no_message_is_hung_up_on(watch: HeartbeatServer) -> None:
    caller = Caller(watch, expect(watch), 0)
    caller.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert caller.is_hung_up_on()


def test_ranks_of_an_attempt_that_is_over_say_nothing_any_more(watch: HeartbeatServer) -> None:
    old = Caller(watch, expect(watch), 0)
    old.say(state="running", rows=[{"step": 1}])
    until(watch, lambda beat: beat.ranks[0].state == "running")
    expect(watch)
    old.say(state="running", rows=[{"step": 2}])
    assert old.is_hung_up_on()
    beat = watch.poll(0, 0.0)
    assert (beat.rows, [r.state for r in beat.ranks]) == ((), ["starting", "starting"])


def test_ranks_of_an_attempt_that_is_over_are_hung_up_on_though_they_say_nothing(
    watch: HeartbeatServer,
) -> None:
    """Behind a cut network they hear of it once it is mended, and end themselves."""
    old = Caller(watch, expect(watch), 0)
    until(watch, lambda beat: beat.ranks[0].pid == 100)
    expect(watch)
    assert old.is_hung_up_on()


def test_rows_come_once_and_in_order_and_what_is_saved_is_told(watch: HeartbeatServer) -> None:
    caller = Caller(watch, expect(watch), 0)
    for step in range(100):
        caller.say(state="running", step=step, rows=[{"step": step}])
    rows: list[Any] = []
    while len(rows) < 100:
        rows += watch.poll(len(rows), 0.01).rows
    assert rows == [{"step": step} for step in range(100)]
    assert watch.poll(100, 0.0).rows == ()
    watch.tell({"saved": 100})
    while caller.hear("saved") != {"saved": 100}:
        pass


def test_the_largest_gap_between_beats_is_known_and_fades(watch: HeartbeatServer) -> None:
    caller = Caller(watch, expect(watch), 0)
    caller.say(state="running")
    until(watch, lambda beat: beat.ranks[0].state == "running")
    time.sleep(0.3)
    caller.say(state="running", step=1)
    gap = until(watch, lambda beat: beat.ranks[0].step == 1).gap
    assert gap >= 0.3
    for step in range(2, 60):
        caller.say(state="running", step=step)
    assert until(watch, lambda beat: beat.ranks[0].step == 59).gap < gap / 2


def test_rows_that_come_while_a_death_is_looked_into_are_not_lost(watch: HeartbeatServer) -> None:
    token = expect(watch)
    first, second = Caller(watch, token, 0), Caller(watch, token, 1)
    first.say(state="running", step=1, rows=[{"step": 1}])
    second.say(state="running", step=1)
    rows: list[Any] = []
    until(watch, lambda beat: bool(rows.extend(beat.rows)) or all(r.state == "running" for r in beat.ranks))
    second.socket.close()
    second._lines.close()

    def cause(rank: RankStatus) -> tuple[Cause, str]:
        first.say(state="running", step=2, rows=[{"step": 2}])
        time.sleep(0.1)
        return Cause("lost"), f"rank {rank.rank} was pulled"

    deadline = time.monotonic() + 10
    while len(rows) < 2:
        rows += watch.poll(0, 0.01, cause).rows
        assert time.monotonic() < deadline, rows
    assert rows == [{"step": 1}, {"step": 2}]
    assert watch.poll(0, 0.0).ranks[1].error == "rank 1 was pulled"


def test_ranks_are_spoken_to_though_nobody_looks(
    watch: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks may wait for storage for longer than a rank waits for a word."""
    monkeypatch.setattr("cluster.workers.heartbeat.REPLY", 0.05)
    caller = Caller(watch, expect(watch), 0)
    watch.poll(7, 0.0)
    for _ in range(3):
        while caller.hear("saved") != {"saved": 7}:
            pass
    expect(watch)
    assert Caller(watch, expect(watch), 0).hear("saved") == {"saved": 0}


def test_clocks_of_hosts_are_not_compared(watch: HeartbeatServer) -> None:
    """A rank whose clock is a year ahead, and its monotonic one too: it says how long ago things were."""
    year = 365 * 86400.0
    caller = Caller(watch, expect(watch), 0)
    ahead = wall() + year
    told = {"cause": {"end": "raised", "name": "OSError"}, "failed_at": year, "failed_ago": 3.0}
    rows = [{"step": 1, "time": ahead - 5.0}, {"step": 2}]
    began = time.monotonic()
    caller.say(state="failed", error="why", ended=True, now=ahead, rows=rows, **told)
    beat = until(watch, lambda beat: beat.ranks[0].state == "failed")
    assert beat.ranks[0].cause == Cause("raised", name="OSError")
    assert began - 3.5 <= beat.ranks[0].failed_at <= time.monotonic() - 3.0
    assert [row.get("time", 0.0) for row in beat.rows] == [pytest.approx(wall() - 5.0, abs=2.0), 0.0]


def test_a_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall()
    monkeypatch.setattr(time, "time", lambda: before + 1e6)
    assert 0.0 <= wall() - before < 5.0


def test_a_watcher_that_was_frozen_itself_takes_nobody_for_silent(
    watch: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has heard what came meanwhile, no time has passed for it."""
    caller = Caller(watch, expect(watch), 0)
    caller.say(state="running", step=1)
    until(watch, lambda beat: beat.ranks[0].step == 1)
    frozen, thawed, behind = threading.Event(), threading.Event(), [0.0]
    select = watch._selector.select

    def gate(timeout: float) -> Any:
        frozen.set()
        assert thawed.wait(10)
        return select(timeout)

    monkeypatch.setattr(
        "cluster.workers.heartbeat.time", SimpleNamespace(monotonic=lambda: time.monotonic() + behind[0])
    )
    monkeypatch.setattr(watch._selector, "select", gate)
    assert frozen.wait(10)
    behind[0] = 3600.0
    caller.say(step=2)
    before = watch.poll(0, 0.0)
    assert before.at - before.ranks[0].heard < 60
    thawed.set()
    after = until(watch, lambda beat: beat.at > before.at + 1800)
    assert after.ranks[0].step == 2
    assert after.at - after.ranks[0].heard < 60

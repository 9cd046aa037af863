"""A gang of real processes, with entry points that do nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.workers.gang import FINISHED, Bundle, GangStatus
from cluster.workers.process_gang import ProcessGang

TIMEOUT = 90.0


@pytest.fixture
def gang() -> Iterator[ProcessGang]:
    """A gang that is not started; all its processes are gone at the end."""
    found = ProcessGang()
    yield found
    found.close()


def poll_until(
    gang: ProcessGang, seen: Callable[[GangStatus], bool], rows: list[Any] | None = None
) -> GangStatus:
    """Poll as a controller does, storing all rows, until a beat shows what is wanted."""
    stored: list[Any] = [] if rows is None else rows
    deadline = time.monotonic() + TIMEOUT
    while True:
        beat = gang.poll(len(stored))
        stored.extend(beat.rows)
        if seen(beat):
            return beat
        assert time.monotonic() < deadline, f"not seen: {beat}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process runs no more; one that waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_run_to_their_end_and_no_row_is_lost(gang: ProcessGang) -> None:
    gang.start(2, Bundle(), "targets:count", {"steps": 50})
    rows: list[Any] = []
    beat = poll_until(gang, lambda beat: all(rank.state in FINISHED for rank in beat.ranks), rows)
    assert [rank.state for rank in beat.ranks] == ["done", "done"], beat
    assert [rank.step for rank in beat.ranks] == [50, 50]
    assert rows == [{"step": step} for step in range(1, 51)]
    results = [rank.result for rank in beat.ranks]
    assert [(r["rank"], r["world_size"], r["local_rank"]) for r in results] == [(0, 2, 0), (1, 2, 1)]
    assert len({(r["host"], r["port"]) for r in results}) == 1
    assert [r["serves"] for r in results] == [True, False]
    assert results[1]["config"] == {"steps": 50}
    pids = [rank.pid for rank in beat.ranks]
    assert len({os.getpid(), *pids}) == 3
    assert gang.poll(len(rows)).rows == ()
    gang.stop()
    gang.stop()
    assert all(gone(pid) for pid in pids)
    gang.close()
    gang.close()


def test_a_gang_can_be_closed_while_the_interpreter_ends(tmp_path: Path) -> None:
    """When no thread can be started any more."""
    code = (
        "import atexit, os, time; from cluster.workers.gang import Bundle\n"
        "from cluster.workers.process_gang import ProcessGang\n"
        "gang = ProcessGang(); atexit.register(gang.close); gang.start(2, Bundle(), 'targets:wait', {})\n"
        "print(*[rank.pid for rank in gang.poll(0).ranks], flush=True)\n"
    )
    here = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=TIMEOUT,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(gone(int(word)) for word in ended.stdout.split())


def test_a_process_that_cannot_fork_is_named_by_its_rank_and_nothing_is_left(
    gang: ProcessGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang.start(2, Bundle(), "targets:wait", {})
    beat = poll_until(gang, lambda beat: all(rank.state == "running" for rank in beat.ranks))
    parents = [psutil.Process(rank.pid).ppid() for rank in beat.ranks]
    expect = gang._heartbeats.expect

    def kill_and_expect(nodes: list[str]) -> str:
        """A process dies after the last ranks are gone and before it forks the next."""
        os.kill(parents[0], signal.SIGKILL)
        return expect(nodes)

    with monkeypatch.context() as dying:
        dying.setattr(gang._heartbeats, "expect", kill_and_expect)
        with pytest.raises(TimeoutError, match=r"^workers did not start: rank 0: "):
            gang.start(4, Bundle(), "targets:wait", {})
    launched = [rank.pid for rank in gang.poll(0).ranks if rank.pid]
    gang.stop()
    deadline = time.monotonic() + TIMEOUT
    while not all(gone(pid) for pid in [*parents, *launched]):
        assert time.monotonic() < deadline, "a process outlived a start that failed"
        time.sleep(0.01)
    gang.start(2, Bundle(), "targets:wait", {})
    poll_until(gang, lambda beat: all(rank.state == "running" for rank in beat.ranks))


def test_a_rank_that_dies_one_that_fails_and_one_that_stops(gang: ProcessGang) -> None:
    gang.start(3, Bundle(), "targets:one_fails", {"fails": 2})
    beat = poll_until(
        gang,
        lambda beat: (
            [r.step for r in beat.ranks[:2]] == [1, 1] and beat.ranks[2].state not in ("starting", "running")
        ),
    )
    assert beat.ranks[2].state == "failed"
    assert beat.ranks[2].error.startswith("ValueError: two lines (targets.py:")
    assert beat.ranks[2].failed_at > 0
    killed = time.monotonic()
    os.kill(beat.ranks[1].pid, signal.SIGKILL)
    beat = poll_until(gang, lambda beat: beat.ranks[1].state != "running")
    assert beat.ranks[1].state == "dead"
    # A test that runs beside this one may have the kernel end a process for want of memory, which is told then.
    assert beat.ranks[1].error.startswith("process ended with exit code -9")
    assert killed <= beat.ranks[1].failed_at <= time.monotonic()
    assert beat.ranks[0].state == "running"
    assert time.monotonic() - beat.ranks[0].last_heartbeat < 30
    gang.request_stop()
    beat = poll_until(gang, lambda beat: beat.ranks[0].state != "running")
    assert (beat.ranks[0].state, beat.ranks[0].result) == ("done", "stopped")
    assert [rank.state for rank in beat.ranks] == ["done", "dead", "failed"]


def test_a_frozen_rank_is_heard_of_no_more_and_can_be_stopped(gang: ProcessGang) -> None:
    gang.start(1, Bundle(), "targets:wait", {})
    beat = poll_until(gang, lambda beat: beat.ranks[0].state == "running")
    pid, last_heartbeat = beat.ranks[0].pid, beat.ranks[0].last_heartbeat
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    beats = [gang.poll(0, 0.3) for _ in range(2)]
    assert time.monotonic() - began < 30
    assert beats[-1].ranks[0].state == "running"
    assert beats[-1].ranks[0].last_heartbeat - last_heartbeat < 0.5
    os.kill(pid, signal.SIGCONT)
    beat = poll_until(gang, lambda beat: beat.ranks[0].last_heartbeat > last_heartbeat + 1)
    assert beat.ranks[0].state == "running"
    os.kill(pid, signal.SIGSTOP)
    gang.stop()
    assert gone(pid)


def test_the_processes_die_with_the_one_that_started_them(tmp_path: Path) -> None:
    code = (
        "import time; from cluster.workers.gang import Bundle; from cluster.workers.process_gang import ProcessGang\n"
        "gang = ProcessGang(); gang.start(2, Bundle(), 'targets:wait', {})\n"
        "print(*[rank.pid for rank in gang.poll(0).ranks], flush=True); time.sleep(600)\n"
    )
    here = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.01)

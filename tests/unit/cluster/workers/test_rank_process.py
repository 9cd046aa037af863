"""One rank's process: it runs the entry point and answers for it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.workers.gang import RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.rank_process import describe, run, serve_store
from cluster.workers.worker_context import RankInfo

RANK_INFO = RankInfo(rank=0, world_size=1, local_rank=0, host="127.0.0.1", port=1)


def leave_with(*arguments: Any) -> None:
    """Run a rank, and end with its exit code."""
    raise SystemExit(run(*arguments))


def started(server: HeartbeatServer, target: str, **config: Any) -> Any:
    """A process that runs the target as the only rank; killed at the end of the test session at the latest."""
    token = server.expect(["local"])
    arguments = (dataclasses.asdict(RANK_INFO), target, config, server.address, token)
    process = multiprocessing.get_context("fork").Process(target=leave_with, args=arguments, daemon=True)
    process.start()
    return process


def until(server: HeartbeatServer, seen: Callable[[RankStatus], bool]) -> tuple[RankStatus, list[Any]]:
    """Poll until the rank is as wanted; the status, and all rows on the way."""
    deadline, rows = time.monotonic() + 30, []
    while True:
        status = server.poll(0, 0.01)
        rows += status.rows
        if seen(status.ranks[0]):
            return status.ranks[0], rows
        assert time.monotonic() < deadline, status


def ended(status: RankStatus) -> bool:
    return status.state in ("done", "failed")


def test_a_rank_that_imports_between_two_steps_is_seen_to_live(server: HeartbeatServer) -> None:
    """Each module that a library imports is news, so a cold file system looks different from a hang."""
    started(server, "targets:imports", modules=3)
    counts = set[int]()

    def sees_the_end(status: RankStatus) -> bool:
        counts.add(status.modules)
        return ended(status)

    status, _ = until(server, sees_the_end)
    assert (status.state, status.step) == ("done", 1)
    assert len({count for count in counts if count > max(counts) - 3}) == 3


def test_a_rank_says_how_far_its_work_between_two_steps_is(server: HeartbeatServer) -> None:
    process = started(server, "targets:evaluates", batches=3)
    begun, _ = until(server, lambda status: status.work is not None and status.work.done == 2)
    assert begun.work is not None
    assert (begun.work.name, begun.work.unit) == ("evaluation of validation after step 1", "batches")
    assert begun.work.of == 3
    assert 0.2 <= begun.work.seconds < 60
    assert begun.work.seconds_left == pytest.approx(begun.work.seconds / 2)
    until(server, lambda status: status.work is None and status.step == 1)
    process.kill()


def test_a_heartbeat_has_only_what_has_changed(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads those of thousands of ranks in one thread."""
    messages: list[dict[str, Any]] = []
    receive = server._receive

    def receive_and_keep(connection: Any, message: dict[str, Any]) -> bool:
        messages.append(message)
        return receive(connection, message)

    monkeypatch.setattr(server, "_receive", receive_and_keep)
    started(server, "targets:wait")
    until(server, lambda status: status.step >= 1 and len(messages) > 20)
    assert sum("state" in message for message in messages) <= 2  # starting, running
    assert [message for message in messages if "step" in message][-1]["step"] == 1
    assert {} in messages
    server.broadcast({"stop": True})
    status, _ = until(server, ended)
    assert (status.state, status.result, status.step) == ("done", "stopped", 1)


def test_a_rank_that_ends_is_done_with_its_result_and_all_rows(server: HeartbeatServer) -> None:
    process = started(server, "targets:count", steps=3)
    status, rows = until(server, ended)
    assert (status.state, status.step, status.error) == ("done", 3, "")
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert status.result["config"] == {"steps": 3}
    process.join(10)
    assert (process.exitcode, status.pid) == (0, process.pid)


def test_a_stop_reaches_the_rank(server: HeartbeatServer) -> None:
    started(server, "targets:wait")
    status, _ = until(server, lambda status: status.step >= 1)
    assert status.state == "running"
    server.broadcast({"stop": True})
    status, _ = until(server, ended)
    assert (status.state, status.result) == ("done", "stopped")


def test_a_rank_that_raises_has_failed_and_says_where(server: HeartbeatServer) -> None:
    before = time.monotonic()
    process = started(server, "targets:one_fails", fails=0)
    status, _ = until(server, ended)
    assert status.state == "failed"
    assert status.error.startswith("ValueError: two lines (targets.py:")
    assert before <= status.failed_at <= time.monotonic()
    assert status.result is None
    process.join(10)
    assert process.exitcode == 1


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("targets:exits", "SystemExit: 3 (targets.py:"),
        ("targets:nothing", "AttributeError: module 'targets' has no attribute 'nothing'"),
        ("no_such_module:main", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_whatever_ends_a_rank_is_told(server: HeartbeatServer, target: str, error: str) -> None:
    started(server, target)
    status, _ = until(server, ended)
    assert (status.state, status.error[: len(error)]) == ("failed", error)


def test_a_notice_is_passed_on_and_does_not_end_the_rank(server: HeartbeatServer) -> None:
    process = started(server, "targets:wait")
    until(server, lambda status: status.step >= 1)
    os.kill(process.pid, signal.SIGTERM)
    status, _ = until(server, lambda status: status.leaving)
    assert status.state == "running"


def test_a_rank_that_nobody_watches_any_more_ends_itself(server: HeartbeatServer) -> None:
    process = started(server, "targets:wait")
    until(server, lambda status: status.step >= 1)
    server.close()
    process.join(10)
    assert process.exitcode == 1


def test_a_store_is_served_on_a_free_port() -> None:
    from torch.distributed import TCPStore

    stores = [serve_store("127.0.0.1") for _ in range(2)]
    assert len({store.port for store in stores}) == 2
    for one in stores:
        client = TCPStore("127.0.0.1", one.port, is_master=False)
        client.set("from", "a client")
        assert one.get("from") == b"a client"


# -- the line


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("a\n\n  b\tc"), "ValueError: a b c (test_rank_process.py:"),
        (KeyError("name"), "KeyError: 'name' (test_rank_process.py:"),
        (RuntimeError(), "RuntimeError: no message (test_rank_process.py:"),
        (
            ExceptionGroup("several", [ValueError("a")]),
            "ExceptionGroup: several (1 sub-exception) (test_rank_process.py:",
        ),
    ],
)
def test_an_error_is_one_line(error: BaseException, wanted: str) -> None:
    line = describe(raised(error))
    assert line.startswith(wanted)
    assert "\n" not in line


def test_a_long_message_is_cut() -> None:
    assert len(describe(raised(ValueError("x" * 10_000)))) < 600


def test_the_place_is_the_innermost() -> None:
    with pytest.raises(ValueError, match="invalid literal") as found:
        raised(ValueError(int("x")))
    assert describe(found.value).endswith(f"(test_rank_process.py:{found.traceback[-1].lineno + 1})")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe(ValueError("a")) == "ValueError: a"

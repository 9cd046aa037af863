"""One rank's process: it runs the entry point and answers for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cluster.host import RankHost, describe
from cluster.link import Seat

SEAT = Seat(rank=0, world=1, local_rank=0, host="127.0.0.1", port=1)


def until_ended(host: RankHost) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (answer := host.beat(0, 0))["state"] in ("starting", "running"):
        assert time.monotonic() < deadline, "the rank does not end"
        time.sleep(0.002)
    return answer


def launched(target: str, **config: Any) -> RankHost:
    host = RankHost()
    host.launch(SEAT, target, config)
    return host


def test_before_the_launch() -> None:
    host = RankHost()
    host.request_stop()
    assert host.beat(0, 0) == {
        "state": "starting", "error": "", "failed_at": 0.0, "result": None, "step": -1, "rows": (),
    }  # fmt: skip


def test_a_rank_that_ends_is_done_with_its_result_and_all_rows() -> None:
    answer = until_ended(launched("targets:count", steps=3))
    assert (answer["state"], answer["step"], answer["error"]) == ("done", 3, "")
    assert answer["rows"] == ({"step": 1}, {"step": 2}, {"step": 3})
    assert answer["result"]["config"] == {"steps": 3}
    assert answer["result"]["world"] == 1


def test_a_stop_reaches_the_rank() -> None:
    host = launched("targets:wait")
    deadline = time.monotonic() + 30
    while host.beat(0, 0)["step"] < 1:
        assert time.monotonic() < deadline
    assert host.beat(0, 0)["state"] == "running"
    host.request_stop()
    answer = until_ended(host)
    assert (answer["state"], answer["result"]) == ("done", "stopped")


def test_a_rank_that_raises_has_failed_and_says_where() -> None:
    before = time.time()
    answer = until_ended(launched("targets:one_fails", fails=0))
    assert answer["state"] == "failed"
    assert answer["error"].startswith("ValueError: two lines (targets.py:")
    assert before <= answer["failed_at"] <= time.time()
    assert answer["result"] is None


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("targets:exits", "SystemExit: 3 (targets.py:"),
        ("targets:nothing", "AttributeError: module 'targets' has no attribute 'nothing'"),
        ("no_such_module:main", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_whatever_ends_a_rank_is_told(target: str, error: str) -> None:
    answer = until_ended(launched(target))
    assert (answer["state"], answer["error"][: len(error)]) == ("failed", error)


def test_a_store_is_served_on_a_free_port() -> None:
    from torch.distributed import TCPStore

    host = RankHost()
    ports = {host.open_store("127.0.0.1"), (other := RankHost()).open_store("127.0.0.1")}
    assert len(ports) == 2
    host.launch(SEAT, "targets:count", {"steps": 0})
    assert until_ended(host)["result"]["serves"]
    for one in (host, other):
        client = TCPStore("127.0.0.1", one._store.port, is_master=False)
        client.set("from", "a client")
        assert one._store.get("from") == b"a client"


# -- the line


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("a\n\n  b\tc"), "ValueError: a b c (test_host.py:"),
        (KeyError("name"), "KeyError: 'name' (test_host.py:"),
        (RuntimeError(), "RuntimeError: no message (test_host.py:"),
        (
            ExceptionGroup("several", [ValueError("a")]),
            "ExceptionGroup: several (1 sub-exception) (test_host.py:",
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
    assert describe(found.value).endswith(f"(test_host.py:{found.traceback[-1].lineno + 1})")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe(ValueError("a")) == "ValueError: a"

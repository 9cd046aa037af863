"""The fake keeps the gang's contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gang import Attempt, FakeGang

from cluster.workers.gang import Bundle, Gang, GangStatus, RankStatus

RANK = RankStatus(0, "node-0", 1, "running", step=1)


def two_beats(gang: Attempt) -> Iterator[GangStatus]:
    yield GangStatus((RANK,), ({"step": 1},))
    yield GangStatus((RANK,), ({"step": gang.saved, "stop": gang.stop_requested},))


def test_beats_follow_the_script_and_the_last_one_stays() -> None:
    gang: Gang = FakeGang(two_beats)
    gang.start(2, Bundle(), "module:function", {"a": 1})
    assert gang.poll(0).rows == ({"step": 1},)
    gang.request_stop()
    assert gang.poll(1).rows == ({"step": 1, "stop": True},)
    assert gang.poll(2) == GangStatus((RANK,), ())
    gang.stop()
    gang.stop()


def test_a_gang_that_is_refused_never_ran() -> None:
    gang = FakeGang(two_beats, refusals=["no room"])
    with pytest.raises(TimeoutError, match="no room"):
        gang.start(2, Bundle(), "module:function", {})
    with pytest.raises(RuntimeError, match="not running"):
        gang.poll(0)


def test_nobody_looks_at_a_gang_that_does_not_run() -> None:
    gang = FakeGang(two_beats)
    with pytest.raises(RuntimeError, match="not running"):
        gang.poll(0)
    gang.start(1, Bundle(), "module:function", {})
    gang.stop()
    with pytest.raises(RuntimeError, match="not running"):
        gang.poll(0)

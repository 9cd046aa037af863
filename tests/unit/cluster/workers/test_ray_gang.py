"""What a gang of Ray actors makes of what Ray says; the rest of it is tested on real nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from cluster.workers.gang import Cause, RankStatus
from cluster.workers.ray_gang import RayGang


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemoryError("Memory on the node was 2.87GB / 2.93GB"), Cause("starved", name="place")),
        (ActorDiedError(), Cause("lost", name="place")),
    ],
)
def test_a_place_that_ray_ended_for_want_of_memory_is_told_from_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: RayError, cause: Cause
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "get", refuse)
    host = SimpleNamespace(cause=SimpleNamespace(remote=lambda pid: None))
    gang = RayGang()
    try:
        gang._slots = [(SimpleNamespace(hosts=[host]), 0)]  # type: ignore[list-item]
        assert gang._cause(RankStatus(0, "127.0.0.2", 1, "dead"))[0] == cause
    finally:
        gang._heartbeats.close()


def test_workers_beyond_those_to_keep_are_released_and_those_of_ranks_are_not() -> None:
    """Else rollout workers and other runs never get their room."""
    released: list[str] = []

    def made(name: str) -> Any:
        return SimpleNamespace(hosts=[name], release=lambda: released.append(name))

    gang = RayGang()
    try:
        gang._groups = [made("a"), made("b"), made("c")]
        gang._pending = [made("coming")]
        gang._slots = [(gang._groups[1], 0), (gang._groups[2], 0)]
        gang.prewarm(4)
        assert released == []
        gang.prewarm(2)
        assert released == ["coming", "a"]
        gang.prewarm(1)
        assert (released, gang.ready()) == (["coming", "a"], 2)
    finally:
        gang._heartbeats.close()

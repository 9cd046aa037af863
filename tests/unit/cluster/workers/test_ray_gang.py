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

"""What can be told of Ray's errors without Ray."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from cluster.ray_gang import _cause


def test_a_death_is_told_by_its_cause() -> None:
    error = RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: RayRankHost\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n"
        "\n The worker was killed by SIGKILL.\n"
    )
    assert (
        _cause(error)
        == "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    )


@pytest.mark.parametrize("error", [ActorDiedError(), RayActorError()])
def test_a_death_without_a_cause_is_told_all_the_same(error: RayActorError) -> None:
    assert _cause(error).startswith("The actor ")
    assert "\n" not in _cause(error)


def test_a_long_cause_is_cut() -> None:
    assert len(_cause(RayActorError(error_msg="killed " + "x" * 1000))) == 300

"""Faults of a gang, and nodes that get no ranks. `test_decide` has the table of faults."""

from __future__ import annotations

from cluster.workers.gang import Cause
from orchestrator.controller.health import EXCLUSION, STRIKES, Failure, excluded


def test_a_node_where_ranks_keep_failing_gets_none_for_a_while() -> None:
    """Asked for in ray#54576."""
    failures = [
        Failure(time, step=int(time), where="a rank", why="died", cause=Cause("exited", -9), node=node)
        for time, node in enumerate(["bad", "good", "", "bad", "", ""], start=1)
    ]
    assert excluded(failures, 10.0) == set()
    failures.append(Failure(9.0, 9, "a rank", "died", Cause("exited", -9), node="bad"))
    assert STRIKES == 3
    assert excluded(failures, 10.0) == {"bad"}
    assert excluded(failures, 8.9 + EXCLUSION) == {"bad"}
    assert excluded(failures, 9.1 + EXCLUSION) == set()

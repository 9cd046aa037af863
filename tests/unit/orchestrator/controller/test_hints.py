"""What the end of a rank is taken to mean."""

from __future__ import annotations

from typing import get_args

import pytest

from cluster.workers.gang import Cause, ErrorKind
from orchestrator.controller.hints import ENDS, ERRORS, EXITS, hint_for

MEANS = {
    Cause("starved", -9): "the machine's memory",
    Cause("exited", -9): "killed from outside",
    Cause("exited", -15): "asked to end",
    Cause("exited", -11): "native code crashed",
    Cause("exited", -7): "shared memory",
    Cause("exited", 3): "ended by itself",
    Cause("lost"): "the worker is gone",
    Cause("silent"): "frozen",
    Cause("still"): "wait for each other",
    Cause("unplaced"): "could not place",
    Cause("raised", kind="gpu_memory"): "the GPU's memory",
    Cause("raised", kind="memory"): "the machine's memory",
    Cause("raised", kind="unstable"): "unstable",
    Cause("raised", kind="storage_full"): "storage is full",
    Cause("raised", kind="peer_lost"): "a connection",
    Cause("raised", kind="corrupt_commit"): "the one before is used",
    Cause("raised", kind="input"): "the job is wrong",
    Cause("raised", name="KeyError"): "the program raised it",
}


@pytest.mark.parametrize("cause", MEANS)
def test_an_end_has_a_meaning(cause: Cause) -> None:
    assert MEANS[cause] in hint_for(cause)


def test_every_meaning_comes_with_a_hint() -> None:
    assert set(ERRORS) == set(get_args(ErrorKind))
    known = [*EXITS.values(), *ENDS.values(), *ERRORS.values()]
    assert all(meaning and hint and "\n" not in meaning + hint for meaning, hint in known)

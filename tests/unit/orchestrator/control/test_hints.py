"""Faults as they are told, and what they are taken to mean."""

from __future__ import annotations

import pytest

from cluster.workers.gang import Cause
from orchestrator.control.hints import ENDS, EXITS, RAISED, explain

ENDED = {
    Cause("starved", -9): "the machine's memory",
    Cause("exited", -9): "killed from outside",
    Cause("exited", -15): "told to end",
    Cause("exited", -11): "native code crashed",
    Cause("exited", -7): "shared memory",
    Cause("exited", 3): "ended by itself",
    Cause("lost"): "the place is gone",
    Cause("silent"): "frozen",
    Cause("still"): "wait for each other",
    Cause("unplaced"): "could not place",
}
RAISED_SO = {
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "the GPU's memory",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory": "the machine's memory",
    "NonFinite: loss is nan at step 8": "unstable",
    "OSError: [Errno 28] No space left on device": "storage is full",
    "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.2]:1": "a connection",
    "CorruptCommit: step 40: shard-00000 is damaged": "the one before is used",
    "InputError: no data": "the job is wrong",
    "KeyError: 'x' (model.py:3)": "the program raised it",
}


@pytest.mark.parametrize("cause", ENDED)
def test_an_end_is_explained_by_how_it_was_and_not_by_its_words(cause: Cause) -> None:
    assert ENDED[cause] in explain(cause, "exit code -6; no step for 3 s; memory monitor")
    assert "\n" not in explain(cause, "")


@pytest.mark.parametrize("why", RAISED_SO)
def test_an_exception_is_explained(why: str) -> None:
    assert RAISED_SO[why] in explain(Cause("raised"), why)


def test_every_explanation_says_what_to_do() -> None:
    told = [*EXITS.values(), *ENDS.values(), *((cause, hint) for _, cause, hint in RAISED)]
    assert all(cause and hint for cause, hint in told)

"""Faults as they are told, and what they are taken to mean."""

from __future__ import annotations

import pytest

from orchestrator.explain import CAUSES, explain

TOLD = {
    "rank 1 on a: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "the GPU's memory",
    "rank 1 on a died: process ended with exit code -9; the kernel ended it for want of memory": "the machine's memory",
    "rank 1 on a died: process ended with exit code -9": "killed from outside",
    "rank 1 on a died: process ended with exit code -11": "native code crashed",
    "rank 1 on a died: process ended with exit code -7": "shared memory",
    "rank 1 on a died: the node or its Ray worker is gone: The actor died": "the node is gone",
    "rank 1 on a: no sign of life for 2.1 s": "frozen",
    "no step for 8 s": "wait for each other",
    "rank 0 on a: NonFinite: loss is nan at step 8": "unstable",
    "rank 0 on a: OSError: [Errno 28] No space left on device": "storage is full",
    "rank 0 on a: RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.2]:1": "a connection",
    "rank 0 on a: CorruptCommit: step 40: shard-00000 is damaged": "the one before is used",
    "no room for 4 of 4 groups of 1 workers": "could not place",
    "rank 0 on a: InputError: no data": "the job is wrong",
    "rank 0 on a: KeyError: 'x' (model.py:3)": "the program raised it",
}


@pytest.mark.parametrize("fault", TOLD)
def test_a_fault_is_explained(fault: str) -> None:
    assert TOLD[fault] in explain(fault)
    assert "\n" not in explain(fault)


def test_every_explanation_says_what_to_do() -> None:
    assert all(cause and mend for _, cause, mend in CAUSES)

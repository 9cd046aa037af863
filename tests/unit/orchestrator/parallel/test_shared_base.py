"""Weights that are not trained, held once: who finds whose, what a write changes, and what is left of the dead."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchestrator.parallel.shared_base import share

SHAPES = [torch.Size((3, 5)), torch.Size((7,)), torch.Size((2, 2))]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"orchestrator-bases-{os.getuid()}"


class Filler:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        self.calls += 1
        for number, tensor in enumerate(tensors):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * number)


def test_the_second_has_the_memory_of_the_first(folder: Path) -> None:
    fill = Filler()
    first, second = (share("base", SHAPES, fill) for _ in range(2))
    assert first
    assert second
    assert fill.calls == 1
    assert [tensor.shape for tensor in second.tensors] == SHAPES
    for number, (one, other) in enumerate(zip(first.tensors, second.tensors, strict=True)):
        assert torch.equal(one, other)
        assert float(one.flatten()[0]) == 100 * number
    inodes = {os.fstat(each._descriptor).st_ino for each in (first, second)}
    assert len(inodes) == 1
    with torch.no_grad():
        second.tensors[0].fill_(-1.0)  # who writes all the same has a copy
    third = share("base", SHAPES, fill)
    assert third
    assert float(first.tensors[0][0, 1]) == float(third.tensors[0][0, 1]) == 1.0
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(first._descriptor, b"x", 0)
    for other in ("another base", "base"):
        found = share(other, SHAPES[:2] if other == "base" else SHAPES, fill)
        assert found
        found.close()
    assert fill.calls == 3
    for each in (first, second, third):
        each.close()
    assert float(first.tensors[1][0]) == 100.0  # what is closed is still there for who holds it
    again = share("base", SHAPES, fill)
    assert again
    assert fill.calls == 4
    again.close()
    assert all(path.stat().st_size < 200 for path in folder.iterdir())


def test_a_process_that_died_leaves_nothing_that_is_found() -> None:
    fill = Filler()
    if (child := os.fork()) == 0:
        share("base", SHAPES, fill)
        os._exit(0)
    os.waitpid(child, 0)
    found = share("base", SHAPES, fill)
    assert found
    assert fill.calls == 1
    found.close()


def test_who_cannot_share_is_told_so(folder: Path) -> None:
    held = share("base", SHAPES, Filler())
    assert held
    (path,) = folder.iterdir()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert share("base", SHAPES, Filler(), wait=0.0) is None
    held.close()
    folder.chmod(0o777)
    assert share("base", SHAPES, Filler()) is None

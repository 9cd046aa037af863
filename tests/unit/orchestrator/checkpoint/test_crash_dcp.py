"""The same enumeration on torch.distributed.checkpoint as it comes: what a crash costs there.

Not a test of ours but of the ground for it: should torch close these holes, this says so.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import posix_model
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

pytestmark = pytest.mark.filterwarnings("ignore")


class RecordedFiles(filesystem.FileSystem):
    """DCP's own file system, its calls written down."""

    def __init__(self, recorder: posix_model.Recorder) -> None:
        self.recorder = recorder

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.recorder.stream(str(path)) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        self.recorder.rename(str(path), str(new_path))

    def rm_file(self, path: Any) -> None:
        self.recorder.unlink(str(path))

    def mkdir(self, path: Any) -> None:
        if not os.path.isdir(path):
            self.recorder.mkdir(str(path))


def save(recorder: posix_model.Recorder, folder: Path, step: int) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=True)
    writer.fs = RecordedFiles(recorder)
    dcp.save(
        {"a": torch.full((64,), float(step)), "b": torch.full((64,), float(step))}, storage_writer=writer
    )
    recorder.mark(step)


def loaded(folder: Path) -> set[float] | None:
    """The values that a load gives: one for a whole commit, two for a mixture; None if it does not load."""
    state = {"a": torch.zeros(64), "b": torch.zeros(64)}
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    except BaseException:  # CheckpointException is no Exception
        return None
    return set(state["a"].tolist()) | set(state["b"].tolist())


def recorded(root: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str]) -> list[posix_model.Op]:
    root.mkdir()
    recorder = posix_model.Recorder(str(root))
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "os", recorder)
        for step, folder in enumerate(folders, 1):
            save(recorder, root / folder, step)
    return recorder.ops


def survivors(
    root: Path, ops: list[posix_model.Op], length: int, lost: dict[int, int | None], folders: list[str]
) -> list[set[float] | None]:
    """What each folder gives after a crash."""
    posix_model.materialise(posix_model.replay(ops, length, lost), root)
    found = [loaded(root / folder) for folder in folders]
    shutil.rmtree(root)
    return found


def first_done(ops: list[posix_model.Op]) -> int:
    return next(at for at, op in enumerate(ops) if isinstance(op, posix_model.Mark)) + 1


def test_a_kill_while_overwriting_loses_both_copies(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = recorded(in_memory / "run", monkeypatch, ["last", "last"])
    outcomes = [
        survivors(in_memory / "state", ops, length, {}, ["last"])[0]
        for length in range(first_done(ops), len(ops) + 1)
    ]
    assert outcomes[0] == {1.0}
    assert outcomes[-1] == {2.0}
    # neither the old state nor the new one, though no byte that was written has been lost
    assert [outcome for outcome in outcomes if outcome not in ({1.0}, {2.0})]


def test_a_power_cut_takes_a_finished_save(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = recorded(in_memory / "run", monkeypatch, ["step1", "step2"])
    chance = random.Random(0)
    states = [state for state in posix_model.states(ops, 600, chance) if state[0] >= first_done(ops)]
    gone = 0
    for length, lost in chance.sample(states, 60):
        whole = [
            found for found in survivors(in_memory / "state", ops, length, lost, ["step1", "step2"]) if found
        ]
        gone += not any(len(found) == 1 and 0.0 not in found for found in whole)
    # a folder of its own for every step does not help: neither the metadata nor the folders are synced
    assert gone

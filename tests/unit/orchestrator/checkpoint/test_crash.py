"""Crash a save and a prune at every point in every legal way: the last commit must be there, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import object_model
import posix_model
import pytest
import torch

from orchestrator.checkpoint import merging, retention
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, prune, rewind
from orchestrator.storage import posix_backend
from orchestrator.storage.file_names import MANIFEST
from orchestrator.storage.posix_backend import PosixBackend
from orchestrator.storage.retry import Retry

STEPS = (10, 20, 30)
Expected = dict[int, tuple[bytes, dict[str, torch.Tensor]]]


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"model.w": torch.randn(4, 3, generator=generator), "optim.w.step": torch.tensor(float(step))}


def run(open_store: Callable[[], Store], log: Any, chance: random.Random) -> Expected:
    """Three saves by two to four writers, what dead attempts leave, and a prune after each."""
    expected: Expected = {}
    keep = chance.randint(1, 2)
    for step in STEPS:
        held = tensors(step)
        open_store().write_shard(step, 0, [full_piece("model.w", torch.zeros(4, 3))])
        store = open_store()
        cuts = sorted(chance.sample(range(1, 4), chance.randint(0, 2)))
        parts = [
            TensorPiece("model.w", (4, 3), (low, 0), held["model.w"][low:high])
            for low, high in itertools.pairwise([0, *cuts, 4])
        ]
        parts.append(full_piece("optim.w.step", held["optim.w.step"]))
        records = []
        for log.actor, part in enumerate(parts, 1):
            records += store.write_shard(step, log.actor, [part])
        log.actor = 0
        with mock.patch.object(merging, "INLINE_BYTES", chance.choice([0, 1 << 16])):  # an index file or none
            published = store.publish(step, records, {"position": step, "receipt": ""})
        expected[step] = (published.to_bytes(), held)
        log.mark(step)
        prune(store, Retention(keep))
    return expected


def problem(store: Store, acknowledged: int | None, expected: Expected) -> str:
    """What is wrong with what a crash left; empty if it is the last commit or the one being made."""
    found = store.latest()
    after = [step for step in STEPS if acknowledged is None or step > acknowledged][:1]
    if found is None:
        return "" if acknowledged is None else f"step {acknowledged} is lost"
    if found.step not in [acknowledged, *after]:
        return f"step {found.step} came back, not {acknowledged}"
    if found.to_bytes() != expected[found.step][0]:
        return f"step {found.step} has another manifest"
    reader = store.reader(found)
    differ = [
        name for name, tensor in expected[found.step][1].items() if not torch.equal(reader.read(name), tensor)
    ]
    return f"step {found.step}: {differ} differ" if differ else ""


def goes_on(store: Store, found: CommitManifest | None) -> bool:
    """A new attempt can commit the next step on top of what a crash left, and prune all else."""
    step = STEPS[-1] + 10 if found is None else found.step + 1
    rewind(store, 0 if found is None else found.step)
    records = store.write_shard(step, 0, [full_piece("model.w", torch.ones(2))])
    store.publish(step, records, {"position": 0, "receipt": ""})
    prune(store, Retention(1))
    left = {path.split("/")[0] for path in store.backend.list()} - {"LATEST"}
    newest = store.latest()
    return newest is not None and newest.step == step and left == {f"step-{step:08d}"}


def verdict(store: Store, step: int | None, expected: Expected, go_on: bool) -> str:
    """`problem`, and whether a new attempt can go on."""
    wrong = problem(store, step, expected)
    if wrong or not go_on or goes_on(store, store.latest()):
        return wrong
    return "the next attempt could not go on"


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> tuple[list[posix_model.Op], Expected]:
    folder.mkdir()
    recorder = posix_model.Recorder(str(folder))
    recorder.mkdir(str(folder / "run"))
    uri = str(folder / "run" / "checkpoints")
    with monkeypatch.context() as patch:
        posix_model.install(patch, recorder)
        expected = run(lambda: Store(uri, retry=Retry(1), threads=1), recorder, random.Random(seed))
    return recorder.interleaved(random.Random(seed)), expected


def acknowledged(ops: list[Any], length: int) -> int | None:
    return next((op.step for op in reversed(ops[:length]) if hasattr(op, "step")), None)


def posix_problems(in_memory: Path, monkeypatch: pytest.MonkeyPatch, each: int) -> Iterator[str]:
    """The problem, or "", of every distinct state; `each` are drawn of one recorded run after another."""
    for seed in itertools.count():
        ops, expected = recorded(in_memory / f"run{seed}", monkeypatch, seed)
        seen: set[int] = set()
        for length, lost in posix_model.states(ops, each, random.Random(seed)):
            tree = posix_model.replay(ops, length, lost)
            step = acknowledged(ops, length)
            key = hash((step, frozenset(tree.items())))
            if key in seen:
                continue
            seen.add(key)
            folder = in_memory / "state"
            posix_model.materialise(tree, folder)
            store = Store(str(folder / "run" / "checkpoints"), retry=Retry(1), threads=1)
            with monkeypatch.context() as patch:
                posix_model.install(patch, posix_model.Unsynced())
                wrong = verdict(store, step, expected, go_on=len(seen) % 10 == 0)
            shutil.rmtree(folder)
            yield f"run {seed}, {length} operations, lost {lost}: {wrong}" if wrong else ""


def object_problems(each: int) -> Iterator[str]:
    """The same for an object store."""
    for seed in itertools.count():
        log = object_model.RecordedObjects()

        def opened(fs: object_model.RecordedObjects = log) -> Store:
            store = Store("memory://run", retry=Retry(1), threads=1)
            store.backend.fs = fs  # type: ignore[attr-defined]
            return store

        expected = run(opened, log, random.Random(seed))
        seen: set[int] = set()
        for crash in object_model.states(log.ops, each, random.Random(seed)):
            objects = object_model.replay(log.ops, crash)
            step = acknowledged(log.ops, crash.length)
            key = hash((step, frozenset(objects.items())))
            if key in seen:
                continue
            seen.add(key)
            store = opened(object_model.RecordedObjects(objects))
            wrong = verdict(store, step, expected, go_on=len(seen) % 10 == 0)
            yield f"run {seed}, {crash}: {wrong}" if wrong else ""


def found_in(problems: Iterator[str], states: int) -> list[str]:
    return [wrong for wrong in itertools.islice(problems, states) if wrong]


def test_posix_sample(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(posix_problems(in_memory, monkeypatch, each=2000), 700) == []


@pytest.mark.slow
def test_object_store_sample() -> None:
    assert found_in(object_problems(each=1000), 1000) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_70_000_posix_states(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(posix_problems(in_memory, monkeypatch, each=10_000), 70_000) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_30_000_object_store_states() -> None:
    assert found_in(object_problems(each=3000), 30_000) == []


def no_file_sync(patch: pytest.MonkeyPatch) -> None:
    real = posix_model.Recorder.fsync

    def fsync(recorder: posix_model.Recorder, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            real(recorder, fd)

    patch.setattr(posix_model.Recorder, "fsync", fsync)


def no_folder_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(posix_backend, "sync_folder", lambda folder: None)


def no_parents_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PosixBackend, "_sync_parents", lambda self, folder: None)


def manifest_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PosixBackend, "publish", lambda self, path, data: self.replace(path, data))
    patch.setattr(PosixBackend, "replace", lambda self, path, data: self._write_unsynced(path, data))

    def write(self: PosixBackend, path: str, data: bytes) -> None:
        fd = posix_backend.os.open(self._path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        posix_backend.os.write(fd, data)
        posix_backend.os.close(fd)

    patch.setattr(PosixBackend, "_write_unsynced", write, raising=False)


def prune_before_publish(patch: pytest.MonkeyPatch) -> None:
    real = Store.publish

    def publish(self: Store, step: int, records: Any, meta: Any) -> CommitManifest:
        sizes = self.backend.list()
        for old in [path for path in sizes if path.endswith(MANIFEST)]:
            retention.remove(self, int(old[5:13]), sizes)
        return real(self, step, records, meta)

    patch.setattr(Store, "publish", publish)


MUTANTS = [no_file_sync, no_folder_sync, no_parents_sync, manifest_in_place, prune_before_publish]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_enumeration_finds_what_is_left_out(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    assert any(itertools.islice(posix_problems(in_memory, monkeypatch, each=1000), 500))

"""What a POSIX file system may hold after a crash, in the manner of ALICE (Pillai et al., OSDI 2014).

`Recorder` stands in for the `os` module of the code under test: calls go through to the real one and are
written down. `volatile` says which of the effects of a prefix need not have reached the disk: data of a file
that was not fsynced since, and names in a directory that was not fsynced since. Any subset of them, in any
order, with data torn at any byte or replaced by zeros, is a legal state.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.storage import atomic, posix_backend

ROOT = 0
Tree = dict[str, bytes | None]  # path -> content, None for a directory


@dataclass(frozen=True)
class Name:
    """A directory gains a name, or loses it if `inode` is None."""

    folder: int
    name: str
    inode: int | None


@dataclass(frozen=True)
class Move:
    """A rename, atomic, over what is there."""

    source: tuple[int, str]
    target: tuple[int, str]
    inode: int


@dataclass(frozen=True)
class Data:
    """Bytes written to a file; `cut` truncates it first."""

    inode: int
    offset: int
    data: bytes
    cut: bool = False


@dataclass(frozen=True)
class Sync:
    inode: int


@dataclass(frozen=True)
class Mark:
    """The code under test said that this is done."""

    step: int


Op = Name | Move | Data | Sync | Mark


def install(patch: pytest.MonkeyPatch, fake: Any) -> None:
    """Let the modules that write files call `fake` for `os`."""
    for module in (atomic, posix_backend):
        patch.setattr(module, "os", fake)


class Unsynced:
    """An `os` that syncs nothing: for states that only live as long as they are looked at."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        pass


@dataclass
class Recorder:
    """An `os` that writes down what changes below `root`. The model says what a sync does, not the disk."""

    root: str
    ops: list[Op] = field(default_factory=list)
    actors: list[int] = field(default_factory=list)
    actor: int = 0  # operations noted under different numbers other than 0 may happen in any order

    def __post_init__(self) -> None:
        self._inodes = {self.root: ROOT}
        self._open: dict[int, tuple[int, int]] = {}
        self._fresh = itertools.count(ROOT + 1)
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mark(self, step: int) -> None:
        self._note(Mark(step))

    def _note(self, op: Op) -> None:
        self.ops.append(op)
        self.actors.append(self.actor)

    def interleaved(self, chance: random.Random) -> list[Op]:
        """The operations, those of actors between two operations of nobody shuffled into each other."""
        mixed: list[Op] = []
        for nobody, group in itertools.groupby(
            zip(self.actors, self.ops, strict=True), lambda pair: pair[0] == 0
        ):
            queues: dict[int, list[Op]] = {}
            for actor, op in group:
                queues.setdefault(0 if nobody else actor, []).append(op)
            while queues:
                actor = chance.choice(sorted(queues))
                mixed.append(queues[actor].pop(0))
                queues = {actor: queue for actor, queue in queues.items() if queue}
        return mixed

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(os.fspath(path))
        return self._inodes[folder], name

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        path = os.fspath(path)
        with self._lock:
            if flags & os.O_CREAT and path not in self._inodes:
                self._inodes[path] = next(self._fresh)
                self._note(Name(*self._place(path), self._inodes[path]))
            elif flags & os.O_TRUNC:
                self._note(Data(self._inodes[path], 0, b"", cut=True))
            self._open[fd] = (self._inodes.get(path, -1), 0)
        return fd

    def write(self, fd: int, data: Any) -> int:
        count = os.write(fd, data)
        with self._lock:
            inode, at = self._open[fd]
            self._note(Data(inode, at, bytes(data[:count])))
            self._open[fd] = (inode, at + count)
        return count

    def fsync(self, fd: int) -> None:
        if self._open[fd][0] >= 0:
            self._note(Sync(self._open[fd][0]))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)
        with self._lock:
            self._inodes[target] = self._inodes[source]
            self._note(Name(*self._place(target), self._inodes[target]))

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)
        source, target = os.fspath(source), os.fspath(target)
        with self._lock:
            self._inodes[target] = self._inodes.pop(source)
            self._note(Move(self._place(source), self._place(target), self._inodes[target]))

    replace = rename

    def unlink(self, path: str) -> None:
        os.unlink(path)
        with self._lock:
            self._note(Name(*self._place(path), None))
            del self._inodes[os.fspath(path)]

    def rmdir(self, path: str) -> None:
        os.rmdir(path)
        with self._lock:
            self._note(Name(*self._place(path), None))
            del self._inodes[os.fspath(path)]

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        os.mkdir(path, mode)
        with self._lock:
            self._inodes[path] = next(self._fresh)
            self._note(Name(*self._place(path), self._inodes[path]))

    def stream(self, path: str) -> io.BufferedWriter:
        """What `open(path, "wb")` gives."""
        return io.BufferedWriter(_Raw(self, path))


class _Raw(io.RawIOBase):
    def __init__(self, recorder: Recorder, path: str) -> None:
        self._recorder = recorder
        self._fd = recorder.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._recorder._open[self._fd][1]

    def write(self, data: Any) -> int:
        return self._recorder.write(self._fd, bytes(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def volatile(ops: list[Op], length: int) -> list[int]:
    """Effects among the first `length` operations that a crash right after them may undo."""
    synced: set[int] = set()
    found = []
    for at in range(length - 1, -1, -1):
        op = ops[at]
        match op:
            case Sync(inode):
                synced.add(inode)
            case Name(folder):
                found += [at] if folder not in synced else []
            case Move(source, target):
                found += [at] if not {source[0], target[0]} <= synced else []
            case Data(inode):
                found += [at] if inode not in synced else []
    return found[::-1]


def replay(ops: list[Op], length: int, lost: dict[int, int | None]) -> Tree:
    """The tree after a crash.

    Args:
        length: operations done.
        lost: effects that did not reach the disk: None wholly; n >= 0 only so many bytes did; -1 only the new
            size of the file did, and it reads as zeros.
    """
    folders: dict[int, dict[str, int]] = {ROOT: {}}
    files: dict[int, bytearray] = {}
    for at, op in enumerate(ops[:length]):
        how = lost.get(at, "kept")
        if how is None:
            continue
        match op:
            case Name(folder, name, None):
                folders.setdefault(folder, {}).pop(name, None)
            case Name(folder, name, inode):
                folders.setdefault(folder, {})[name] = inode  # type: ignore[assignment]
            case Move(source, target, inode):
                folders.setdefault(source[0], {}).pop(source[1], None)
                folders.setdefault(target[0], {})[target[1]] = inode
            case Data(inode, offset, data, cut):
                held = files.setdefault(inode, bytearray())
                if cut:
                    held.clear()
                if how != "kept":
                    data = bytes(len(data)) if how == -1 else data[: int(how)]
                held.extend(bytes(max(0, offset - len(held))))
                held[offset : offset + len(data)] = data
    directories = {op.folder for op in ops if isinstance(op, Name)}
    return dict(_walk(ROOT, "", folders, files, directories))


def _walk(
    folder: int,
    prefix: str,
    folders: dict[int, dict[str, int]],
    files: dict[int, bytearray],
    directories: set[int],
) -> Iterator[tuple[str, bytes | None]]:
    for name, inode in folders.get(folder, {}).items():
        if inode in directories or (inode in folders):
            yield prefix + name, None
            yield from _walk(inode, f"{prefix}{name}/", folders, files, directories)
        else:
            yield prefix + name, bytes(files.get(inode, b""))


def states(ops: list[Op], budget: int, chance: random.Random) -> Iterator[tuple[int, dict[int, int | None]]]:
    """(length, lost) of states: for every prefix all kept, all lost, one lost, one kept; then at random."""
    count = 0
    weights = [2 ** min(len(volatile(ops, length)), 10) for length in range(len(ops) + 1)]
    for length in range(len(ops) + 1):
        loose = volatile(ops, length)
        plain: list[dict[int, int | None]] = [{}, dict.fromkeys(loose)]
        plain += [{at: None} for at in loose]
        plain += [dict.fromkeys(set(loose) - {at}) for at in loose]
        for lost in plain:
            yield length, lost
            count += 1
    while count < budget:
        length = chance.choices(range(len(ops) + 1), weights)[0]
        yield length, {at: how for at in volatile(ops, length) if (how := _fate(ops[at], chance)) != "kept"}
        count += 1


def _fate(op: Op, chance: random.Random) -> Any:
    fates: list[Any] = ["kept", None]
    if isinstance(op, Data):
        fates += [chance.randint(0, len(op.data)), -1]
    return chance.choice(fates)


def materialise(tree: Tree, folder: Path) -> None:
    """Write a tree to a real directory."""
    folder.mkdir()
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)

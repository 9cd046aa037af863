"""What an object store may hold after a crash of its clients.

A put appears whole or not at all. A request that was under way may or may not have been carried out. One
whose answer was lost is sent again, and the first may still arrive later, even after the client is gone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

Objects = dict[str, bytes]


@dataclass(frozen=True)
class Put:
    key: str
    data: bytes
    only_new: bool


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Mark:
    step: int


Op = Put | Delete | Mark


class RecordedObjects(MemoryFileSystem):
    """An object store in memory that writes its requests down."""

    cachable = False

    def __init__(self, objects: Objects | None = None) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.ops: list[Op] = []
        self.actor = 0
        self._lock = threading.RLock()
        for key, data in (objects or {}).items():
            super().pipe_file(key, data)

    def mark(self, step: int) -> None:
        self.ops.append(Mark(step))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self._lock:
            super().pipe_file(path, value, mode=mode, **kwargs)
            self.ops.append(Put(path, bytes(value), mode == "create"))

    def rm_file(self, path: str) -> None:
        with self._lock:
            super().rm_file(path)
            self.ops.append(Delete(path))


@dataclass(frozen=True)
class Crash:
    """The first `length` requests were answered; `flying` were only carried out; `ghosts` came later."""

    length: int
    flying: tuple[int, ...] = ()
    ghosts: tuple[int, ...] = ()


def replay(ops: list[Op], crash: Crash) -> Objects:
    """The objects after a crash."""
    objects: Objects = {}
    for op in [*ops[: crash.length], *(ops[at] for at in (*crash.flying, *crash.ghosts))]:
        match op:
            case Put(key, data, only_new):
                if not (only_new and key in objects):
                    objects[key] = data
            case Delete(key):
                objects.pop(key, None)
    return objects


def states(ops: list[Op], budget: int, chance: random.Random) -> Iterator[Crash]:
    """Every prefix, with the next request carried out or not and with each single ghost; then at random."""
    count = 0
    for length in range(len(ops) + 1):
        flying = (length,) if length < len(ops) else ()
        puts = [at for at in range(length) if isinstance(ops[at], Put)]
        for crash in [Crash(length), Crash(length, flying), *(Crash(length, (), (at,)) for at in puts)]:
            yield crash
            count += 1
    while count < budget:
        length = chance.randint(0, len(ops))
        puts = [at for at in range(length) if isinstance(ops[at], Put)]
        flying = tuple(range(length, min(len(ops), length + 1)))
        ghosts = tuple(chance.sample(puts, min(len(puts), chance.randint(0, 4))))
        yield Crash(length, flying if chance.random() < 0.5 else (), ghosts)
        count += 1

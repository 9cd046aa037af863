"""Weights that are not trained, held once by all processes of a machine that train on the same base.

These are the ranks of a run, and those of other trials of a search. The memory is an anonymous file (memfd), which the
kernel frees when the last process that has it ends, however it ends. A small file in the user's own temporary folder
says which processes have it open. Each maps it privately, so that a write, of which there should be none, is seen by
nobody else; and the file is sealed once it is filled.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
import xxhash
from torch import Tensor

from orchestrator.storage.own_folder import own_folder

ALIGNED = 64
MARK = 64
"""Bytes at the beginning of the memory, which say of what it is; they are written last."""
WAIT = 60.0
"""Longest seconds to wait for a process that fills the memory; after that each has its own."""
SEAL_FUTURE_WRITE = 0x10  # of linux/fcntl.h, which Python has no name for
Fill = Callable[[Sequence[Tensor]], None]


class SharedBase:
    """Tensors in memory that is shared, as this process sees them; `close` gives it up."""

    def __init__(self, tensors: list[Tensor], descriptor: int) -> None:
        self.tensors, self._descriptor = tensors, descriptor

    def close(self) -> None:
        """No process finds the memory here any more. The tensors stay as long as somebody holds them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def share(key: str, shapes: Sequence[torch.Size], fill: Fill, wait: float = WAIT) -> SharedBase | None:
    """fp32 tensors of these shapes, of which `fill` writes the values if no process of this user has them under this
    key; None where memory cannot be shared, or its owner does not come to an end of filling it."""
    name = xxhash.xxh3_128_hexdigest(f"{key} {[tuple(shape) for shape in shapes]}".encode())
    starts, size = _places(shapes)
    try:
        with _locked(own_folder("bases") / name, wait) as file:
            owners = _owners(file)
            found = next((fd for each in owners if (fd := _opened(each, name, size)) is not None), None)
            if found is None:
                found, owners = _made(name, size, lambda memory: fill(_tensors(memory, shapes, starts))), []
            _write(file, [*owners, (os.getpid(), found)])
    except (
        OSError,
        TimeoutError,
        AttributeError,
    ):  # no memfd, no /proc, another user's folder, a frozen owner
        return None
    memory = mmap.mmap(found, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return SharedBase(_tensors(memory, shapes, starts), found)


def _places(shapes: Sequence[torch.Size]) -> tuple[list[int], int]:
    """Where each tensor begins, in bytes, and the size of all."""
    starts, at = [], MARK
    for shape in shapes:
        starts.append(at)
        at += -(-4 * shape.numel() // ALIGNED) * ALIGNED
    return starts, at


def _tensors(memory: mmap.mmap, shapes: Sequence[torch.Size], starts: Sequence[int]) -> list[Tensor]:
    return [
        torch.frombuffer(memory, dtype=torch.float32, count=shape.numel(), offset=at).view(shape)
        for shape, at in zip(shapes, starts, strict=True)
    ]


def _made(name: str, size: int, fill: Callable[[mmap.mmap], None]) -> int:
    """The descriptor of new memory that is filled."""
    descriptor = os.memfd_create(f"base-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        fill(memory)
        memory[:MARK] = name.encode().ljust(MARK, b"\0")
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(owner: tuple[int, int], name: str, size: int) -> int | None:
    """A descriptor of the memory that a process has open; None if it has not, or has something else there by now."""
    with contextlib.suppress(OSError):
        found = os.open(f"/proc/{owner[0]}/fd/{owner[1]}", os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(found).st_size == size and os.pread(found, MARK, 0).rstrip(b"\0") == name.encode():
            return found
        os.close(found)
    return None


@contextlib.contextmanager
def _locked(path: Path, wait: float) -> Iterator[IO[str]]:
    """The file, locked. Raises TimeoutError."""
    with path.open("a+") as file:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path} is locked") from None
                time.sleep(0.05)
        yield file


def _owners(file: IO[str]) -> list[tuple[int, int]]:
    """The processes that had the memory open, each with its descriptor, as far as they are there."""
    file.seek(0)
    lines = [line.split() for line in file]
    found = [
        (int(line[0]), int(line[1])) for line in lines if len(line) == 2 and all(map(str.isdecimal, line))
    ]
    return [owner for owner in found if os.path.exists(f"/proc/{owner[0]}/fd/{owner[1]}")]


def _write(file: IO[str], owners: Sequence[tuple[int, int]]) -> None:
    file.seek(0)
    file.truncate()
    file.writelines(f"{process} {descriptor}\n" for process, descriptor in owners)
    file.flush()

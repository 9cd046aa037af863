"""One copy of frozen weights in memory for all processes of a machine that train on the same base.

These are the ranks of a run, and of other trials of a search. The memory is an anonymous file (memfd). The kernel frees
it when the last process that holds it ends, however it ends. A small file in the user's temporary folder lists the
processes that have it open. The memory file is sealed once it is filled, and each process maps it privately, so that an
accidental write stays in that process.
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
"""Alignment of tensors, in bytes."""
MARK = 64
"""Bytes at the beginning of the memory that identify its content; they are written last."""
WAIT = 60.0
"""Maximum seconds to wait for a process that fills the memory. After that, each process holds its own copy."""
SEAL_FUTURE_WRITE = 0x10  # from linux/fcntl.h; Python has no name for it
Fill = Callable[[Sequence[Tensor]], None]


class SharedBase:
    """Tensors in shared memory, as this process sees them; `close` gives them up."""

    def __init__(self, tensors: list[Tensor], descriptor: int) -> None:
        self.tensors, self._descriptor = tensors, descriptor

    def close(self) -> None:
        """Stop offering the memory to other processes. The tensors live as long as they are referenced."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def share(key: str, shapes: Sequence[torch.Size], fill: Fill, wait: float = WAIT) -> SharedBase | None:
    """Return shared fp32 tensors, filled by this process if no other process of this user has them under the key.

    Args:
        key: identifies the content.
        shapes: of the tensors.
        fill: writes the values.
        wait: maximum seconds to wait for another process that fills them.

    Returns:
        The tensors; None if memory cannot be shared, or if the other process does not finish in time.
    """
    name = xxhash.xxh3_128_hexdigest(f"{key} {[tuple(shape) for shape in shapes]}".encode())
    starts, size = _offsets(shapes)
    try:
        with _locked(own_folder("bases") / name, wait) as file:
            owners = _owners(file)
            result = next((fd for owner in owners if (fd := _opened(owner, name, size)) is not None), None)
            if result is None:
                result = _filled(name, size, lambda memory: fill(_tensors(memory, shapes, starts)))
                owners = []
            _write(file, [*owners, (os.getpid(), result)])
    except (
        OSError,
        TimeoutError,
        AttributeError,
    ):  # no memfd, no /proc, another user's folder, a frozen owner
        return None
    # Writable for torch, which warns of read-only memory; privately, so that a write copies the page.
    memory = mmap.mmap(result, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return SharedBase(_tensors(memory, shapes, starts), result)


def _offsets(shapes: Sequence[torch.Size]) -> tuple[list[int], int]:
    """Return the byte at which each tensor begins, and the total size."""
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


def _filled(name: str, size: int, fill: Callable[[mmap.mmap], None]) -> int:
    """Return the descriptor of new memory, filled and sealed."""
    descriptor = os.memfd_create(f"base-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        fill(memory)
        # Last: memory whose owner was killed while it was filling has no mark, and nobody uses it.
        memory[:MARK] = name.encode().ljust(MARK, b"\0")
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(owner: tuple[int, int], name: str, size: int) -> int | None:
    """Return a descriptor of the memory that a process has open; None if it no longer has it."""
    with contextlib.suppress(OSError):
        result = os.open(f"/proc/{owner[0]}/fd/{owner[1]}", os.O_RDONLY | os.O_CLOEXEC)
        # A process id or a descriptor may have been given to something else since.
        if os.fstat(result).st_size == size and os.pread(result, MARK, 0).rstrip(b"\0") == name.encode():
            return result
        os.close(result)
    return None


@contextlib.contextmanager
def _locked(path: Path, wait: float) -> Iterator[IO[str]]:
    """Open and lock a file. Raises TimeoutError."""
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
    """Return the living processes that have the memory open, each with its descriptor."""
    file.seek(0)
    lines = [line.split() for line in file]
    result = [
        (int(line[0]), int(line[1])) for line in lines if len(line) == 2 and all(map(str.isdecimal, line))
    ]
    return [owner for owner in result if os.path.exists(f"/proc/{owner[0]}/fd/{owner[1]}")]


def _write(file: IO[str], owners: Sequence[tuple[int, int]]) -> None:
    file.seek(0)
    file.truncate()
    file.writelines(f"{process} {descriptor}\n" for process, descriptor in owners)
    file.flush()

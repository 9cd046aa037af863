"""Whether messages between ranks can block each other, by NCCL's rules, found without a device.

Each rank is recorded alone: what it sends and receives, in which communicator and order, and what it waits for. Then
all are played together, with the least that NCCL promises: a send ends when its receive has begun (no buffers), and
what a rank has in one communicator runs in the order in which it was called, a batch as one. An unbatched message is
in a communicator of its two ranks alone, as torch makes them unless a device is bound; a batch in that of the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules


@dataclasses.dataclass(frozen=True)
class Message:
    """What a rank sends to a peer or receives from it."""

    sends: bool
    peer: int
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """Messages that a rank begins together in a communicator."""

    communicator: tuple[int, ...]
    messages: tuple[Message, ...]


Wait = int
"""The number of the call that is waited for."""
Program = list[Call | Wait]
"""What a rank does, in order."""


def stuck(programs: Mapping[int, Program]) -> list[str]:
    """What each rank waits for, if they cannot all end; empty if they can."""
    play = _Play(programs)
    while play.advance():
        pass
    return play.left()


class _Play:
    def __init__(self, programs: Mapping[int, Program]) -> None:
        self._programs = programs
        self._at = dict.fromkeys(programs, 0)
        self._begun: dict[int, list[list[Message]]] = {
            rank: [] for rank in programs
        }  # what is left of each call
        self._queues: dict[tuple[int, tuple[int, ...]], deque[list[Message]]] = defaultdict(deque)

    def advance(self) -> bool:
        """Whether anything could go on."""
        return any([*map(self._run, self._programs), *map(self._match, list(self._queues))])

    def _run(self, rank: int) -> bool:
        before = self._at[rank]
        for step in self._programs[rank][before:]:
            if isinstance(step, Call):
                messages = list(step.messages)
                self._begun[rank].append(messages)
                self._queues[rank, step.communicator].append(messages)
            elif self._begun[rank][step]:
                break
            self._at[rank] += 1
        return self._at[rank] > before

    def _match(self, key: tuple[int, tuple[int, ...]]) -> bool:
        (rank, communicator), moved = key, False
        for message in list(self._head(key)):
            other = self._head((message.peer, communicator))
            wanted = [m for m in other if m.peer == rank and m.sends != message.sends]
            mine = [m for m in self._head(key) if m.peer == message.peer and m.sends == message.sends]
            if wanted and mine:
                assert wanted[0].shape == mine[0].shape, f"rank {rank}: {mine[0]} meets {wanted[0]}"
                other.remove(wanted[0])
                self._head(key).remove(mine[0])
                moved = True
        return moved

    def _head(self, key: tuple[int, tuple[int, ...]]) -> list[Message]:
        queue = self._queues[key]
        while queue and not queue[0]:
            queue.popleft()
        return queue[0] if queue else []

    def left(self) -> list[str]:
        """What has not ended."""
        found = [
            f"rank {rank} waits for {self._begun[rank][step] if isinstance(step, int) else step}"
            for rank, program in self._programs.items()
            for step in program[self._at[rank] : self._at[rank] + 1]
        ]
        return found + [f"{key}: {list(queue)}" for key, queue in self._queues.items() if self._head(key)]


class Recorder:
    """Stands in for the sends and receives of one rank; what is received is zeros."""

    def __init__(self, rank: int, binds_device: bool = False) -> None:
        """`binds_device` is as in `init_process_group`: unbatched messages are then in the group's communicator."""
        self.rank, self.program = rank, Program()
        self._binds_device, self._calls = binds_device, 0

    def call(self, group: Any, messages: Sequence[Message], batched: bool) -> _Work:
        """Record messages that begin together."""
        pair = (self.rank, messages[0].peer)
        whole = batched or self._binds_device
        ranks = dist.get_process_group_ranks(group) if whole else sorted(pair)
        self.program.append(Call((int(whole), *ranks), tuple(messages)))
        self._calls += 1
        return _Work(self.program, self._calls - 1)

    def unbatched(self, tensor: torch.Tensor, peer: int, group: Any, sends: bool) -> _Work:
        """Record a message alone."""
        if not sends:
            tensor.detach().fill_(1)
        return self.call(group, [Message(sends, peer, tuple(tensor.shape))], False)

    def batch(self, ops: Sequence[dist.P2POp]) -> list[_Work]:
        """In place of `dist.batch_isend_irecv`."""
        if not ops:
            return []
        for op in ops:
            if op.op is not dist.isend:
                op.tensor.detach().zero_()
        messages = [Message(op.op is dist.isend, op.peer, tuple(op.tensor.shape)) for op in ops]
        return [self.call(ops[0].group, messages, True)]

    def of_schedule(self, ops: Sequence[dist.P2POp], desc: str | None = None) -> list[_Work]:
        """In place of `schedules._batch_p2p`, which batches only where there are sends and receives."""
        if len({op.op for op in ops}) != 1:
            return self.batch(ops)
        return [self.unbatched(op.tensor, op.peer, op.group, op.op is dist.isend) for op in ops]


class _Work:
    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def wait(self) -> None:
        self._program.append(self._number)

    def is_completed(self) -> bool:
        return False  # what is never waited for is held longest


@contextlib.contextmanager
def recorded(rank: int, world: int, binds_device: bool = False) -> Iterator[Recorder]:
    """This process as one rank of a group in which nothing is sent; its messages are recorded."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    recorder = Recorder(rank, binds_device)

    def send(tensor: torch.Tensor, dst: int, group: Any = None) -> None:
        recorder.unbatched(tensor, dst, group, True).wait()

    def recv(tensor: torch.Tensor, src: int, group: Any = None) -> None:
        recorder.unbatched(tensor, src, group, False).wait()

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "send", send)
            patch.setattr(dist, "recv", recv)
            patch.setattr(dist, "batch_isend_irecv", recorder.batch)
            patch.setattr(schedules, "_batch_p2p", recorder.of_schedule)
            yield recorder
    finally:
        dist.destroy_process_group()

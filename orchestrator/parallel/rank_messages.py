"""Messages between ranks after every step. They use the CPU process group, so that no GPU is synchronised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.data.samples.receipt import add


@dataclass(frozen=True)
class Agreed:
    """Values that all ranks agree on after a step, and lists by rank, of which rank 0 has all.

    Attributes:
        digest: the sum of the ranks' receipt digests, as `receipt.add`.
        stop: whether any rank was asked to stop.
        failures: maximum over ranks of failed saves in a row.
        ready: whether all ranks are ready for a snapshot.
        snapshot_step: the step of the last snapshot that every rank has made, -1 before one; see `Saver.snapshot_step`.
        failed_steps: `Saver.failed_step` of this rank and of those that report to it.
        busy: seconds that each of these ranks computed without waiting for others.
        memory: peak bytes of each.
    """

    digest: int
    stop: bool
    failures: int
    ready: bool
    snapshot_step: int
    failed_steps: tuple[int, ...]
    busy: tuple[float, ...]
    memory: tuple[int, ...]


def agree(
    digest: int,
    stop: bool,
    failures: int = 0,
    ready: bool = True,
    snapshot_step: int = -1,
    failed_step: int = -1,
    busy: float = 0.0,
    memory: int = 0,
) -> Agreed:
    """Combine every rank's values; all ranks call it together.

    Args:
        digest: this rank's part of the step's receipt.
        stop: whether this rank was asked to stop.
        failures: its failed saves in a row.
        ready: whether it can take a snapshot now.
        snapshot_step: the step of its last snapshot, -1 before one.
        failed_step: the step of its last failed save, -1 without one.
        busy: seconds that it computed in the step.
        memory: its peak memory in bytes.
    """
    values = [digest, int(stop), failures, int(ready), snapshot_step, failed_step, int(busy * 1e6), memory]
    rows = gather_rows(torch.tensor([values], dtype=torch.int64))
    # [8, ranks]: of all ranks on rank 0, and elsewhere of the ranks that report to this one.
    digests, stops, failed, readies, snapshot_steps, failed_steps, busies, memories = rows.T.tolist()
    combined = _of_first(
        torch.tensor([add(digests), any(stops), max(failed), all(readies), min(snapshot_steps)])
    )
    all_digests, any_stop, most_failures, all_ready, oldest_snapshot = combined.tolist()
    return Agreed(
        digest=all_digests,
        stop=bool(any_stop),
        failures=most_failures,
        ready=bool(all_ready),
        snapshot_step=oldest_snapshot,
        failed_steps=tuple(failed_steps),
        busy=tuple(microseconds / 1e6 for microseconds in busies),
        memory=tuple(memories),
    )


def reporting_ranks(rank: int, world: int) -> tuple[list[tuple[int, int]], int | None]:
    """Return the neighbours of a rank in a binomial tree, whose root is rank 0.

    Of N ranks, a message passes log2 N on its way to the root, and all ranks together send N - 1. In gloo's rings it
    passes all N, and an all-gather sends N x (N - 1) messages.

    Args:
        rank: the rank.
        world: number of ranks.

    Returns:
        The ranks that report to this one, in order, each with the number of ranks for which it does. They are the
        next ones: rank 4 of 8 hears from rank 5 for itself and from rank 6 for two. Then the rank to which this one
        reports; None for rank 0.
    """
    children: list[tuple[int, int]] = []
    stride = 1
    while stride < world:
        if rank % (2 * stride):
            return children, rank - stride
        if rank + stride < world:
            children.append((rank + stride, min(stride, world - rank - stride)))
        stride *= 2
    return children, None


def gather_rows(mine: torch.Tensor) -> torch.Tensor:
    """Gather every rank's row at rank 0; all ranks call it together.

    Args:
        mine: this rank's row, [1, columns] on the CPU.

    Returns:
        The rows of all ranks on rank 0, [world, columns]. On another rank those of the ranks that report to it.
    """
    children, parent = reporting_ranks(dist.get_rank(), dist.get_world_size())
    parts = [mine]
    for child, ranks in children:
        parts.append(mine.new_empty(ranks, mine.shape[1]))
        dist.recv(parts[-1], child)
    rows = torch.cat(parts)
    if parent is not None:
        dist.send(rows, parent)
    return rows


def sum_over_ranks(mine: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, which call it together. Every rank gets the bits of `tree_sum` of all.

    Args:
        mine: this rank's part, on the CPU.
    """
    children, parent = reporting_ranks(dist.get_rank(), dist.get_world_size())
    result = mine.clone()  # the broadcast fills it
    part = torch.empty_like(mine)
    for child, _ in children:
        dist.recv(part, child)
        result += part
    if parent is not None:
        dist.send(result, parent)
    return _of_first(result)


def _of_first(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor of rank 0, on every rank. gloo sends it along the same tree."""
    if dist.get_world_size() > 1:
        dist.broadcast(value, 0)
    return value


def broadcast_json(value: Any) -> Any:
    """Return the value of rank 0 on every rank. It is sent as JSON, because `broadcast_object_list` pickles."""
    data = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, 0)
    sent = torch.zeros(int(size), dtype=torch.uint8)
    if data:
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(sent, 0)
    return json.loads(sent.numpy().tobytes())


def swap_json(value: Any, to: int, of: int) -> Any:
    """Send a value to one rank and return that of another. Every rank that is sent to names its sender as `of`.

    Args:
        value: what to send.
        to: the rank that gets it.
        of: the rank whose value is returned.
    """
    data = json.dumps(value).encode()
    sizes = torch.tensor([len(data)], dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    _swap(*sizes, to, of)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    arrived = torch.empty(int(sizes[1]), dtype=torch.uint8)
    _swap(sent, arrived, to, of)
    return json.loads(arrived.numpy().tobytes())


def _swap(sent: torch.Tensor, arrived: torch.Tensor, to: int, of: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, arrived, of)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank; all ranks call it together."""
    result = torch.tensor([int(value)])
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return bool(result)


def gather_json(value: Any) -> list[Any]:
    """Return every rank's value, in rank order. Values are sent as JSON, because `all_gather_object` pickles."""
    world = dist.get_world_size()
    data = json.dumps(value).encode()
    sizes = torch.empty(world, dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(data)], dtype=torch.int64))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(world * longest, dtype=torch.uint8)
    dist.all_gather_single(everyone, padded)
    parts = everyone.view(world, longest)
    return [json.loads(bytes(parts[i, : int(sizes[i])].tolist())) for i in range(world)]

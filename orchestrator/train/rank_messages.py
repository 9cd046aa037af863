"""What ranks tell each other between steps, on the CPU group so that no GPU is waited for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.data.receipt import add


@dataclass(frozen=True)
class Agreed:
    """What holds for all ranks alike: the sum of their digests, as `receipt.add` makes it, whether any was asked to
    stop, the most saves in a row that failed on any, whether all are ready for a snapshot, and the seconds that each
    worked by itself."""

    digest: int
    stop: bool
    failures: int
    ready: bool
    busy: tuple[float, ...]


def agree(digest: int, stop: bool, failures: int = 0, ready: bool = True, busy: float = 0.0) -> Agreed:
    """Every rank says the same of itself, and hears what holds for all."""
    mine = torch.tensor([digest, int(stop), failures, int(ready), int(busy * 1e6)], dtype=torch.int64)
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
    dist.all_gather_single(everyone, mine)
    digests, stops, failed, readies, busies = everyone.view(-1, len(mine)).T.tolist()
    return Agreed(
        add(digests),
        any(stops),
        max(failed),
        all(readies),
        tuple(microseconds / 1e6 for microseconds in busies),
    )


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, in rank order. JSON, where `all_gather_object` would pickle."""
    world, data = dist.get_world_size(), json.dumps(value).encode()
    sizes = torch.empty(world, dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(data)], dtype=torch.int64))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(world * longest, dtype=torch.uint8)
    dist.all_gather_single(everyone, padded)
    parts = everyone.view(world, longest)
    return [json.loads(bytes(parts[i, : int(sizes[i])].tolist())) for i in range(world)]

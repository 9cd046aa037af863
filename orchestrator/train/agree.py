"""What ranks tell each other between steps, on the CPU group so that no GPU is waited for."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.data.receipt import add


def agree(digest: int, stop: bool, failures: int = 0) -> tuple[int, bool, int]:
    """The sum of all ranks' digests, as `receipt.add` makes it, whether any rank was asked to stop, and the most
    saves in a row that failed on any rank."""
    mine = torch.tensor([digest, int(stop), failures], dtype=torch.int64)
    everyone = torch.empty(dist.get_world_size() * 3, dtype=torch.int64)
    dist.all_gather_single(everyone, mine)
    values = everyone.tolist()
    return add(values[0::3]), any(values[1::3]), max(values[2::3])


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

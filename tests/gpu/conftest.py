"""Tests that need a GPU are skipped where there is none; what others compute on one, they compute on a CPU too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "dist" / "train")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu where there is none; where there is one, it comes first: its time is short."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.get_closest_marker("gpu") is None)
    else:
        for item in items:
            if item.get_closest_marker("gpu") and Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of this process."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()

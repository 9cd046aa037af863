"""The environment of a trace: a process group without peers, a time limit, and garbage collection at fixed places."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    """Join a fake process group: collectives return at once and leave their outputs as they are.

    Args:
        rank: the rank to play.
        world: number of ranks.
    """
    if dist.is_initialized():
        raise RuntimeError("cannot trace a rank in a process that belongs to a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        # DTensor caches results of operators by their mesh. The mesh of the next trace compares equal, but the groups
        # of the cached one are destroyed.
        _clear_sharding_prop_cache()


class TooLong(Exception):
    """The trace exceeds its CPU time."""


@contextlib.contextmanager
def cpu_time_limit(deadline: float) -> Iterator[None]:
    """Within the context, raise TooLong when a module starts after `deadline` of CPU time.

    Operators must not raise it: torch calls some of them where it cannot handle an exception.
    """

    def check(*_: object) -> None:
        if time.process_time() > deadline:
            raise TooLong

    hook = register_module_forward_pre_hook(check)
    logger = logging.getLogger(schedules.__name__)  # it prints the whole schedule when a stage raises
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        hook.remove()
        logger.setLevel(level)


@contextlib.contextmanager
def fixed_collections() -> Iterator[None]:
    """Within the context, collect garbage at fixed places only, so that every trace of a step is the same.

    Objects from before are frozen: the collector would take longer to visit them than a small trace takes in all.
    """
    was_enabled = gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()

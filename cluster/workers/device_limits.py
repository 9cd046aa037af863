"""Time limits of a rank by its device, such as how long it may be silent. Imports the standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLimits:
    """Time limits in seconds.

    Attributes:
        end: until a killed process is gone. The driver frees GPU memory first, and the kernel unpins host memory.
        stall: until a worker is given up that does not answer although its node does.
        silence: without a heartbeat, after which a training rank counts as silent. This is the minimum.
        hang: without a step, although heartbeats arrive, after which the gang counts as hanging. This is the minimum,
            because a busy machine may delay a step for seconds.
        first_silence: without a heartbeat before the first step. Some libraries hold the interpreter while they load.
    """

    end: float
    stall: float
    silence: float
    hang: float
    first_silence: float


CPU = DeviceLimits(end=1.0, stall=5.0, silence=2.0, hang=10.0, first_silence=30.0)
GPU = DeviceLimits(end=30.0, stall=90.0, silence=20.0, hang=30.0, first_silence=120.0)
"""80 GB take seconds to free, and a restarting allocator or a flapping network is no hang. Estimates, not measured."""
COMPILATION = 60.0
"""Seconds that a step with a new shape may spend on compilation, if blocks are compiled."""


def limits_of(gpu: float, compiles: bool = False) -> DeviceLimits:
    """Return the limits of a rank.

    Args:
        gpu: its GPUs; 0 for a rank on CPUs.
        compiles: whether it compiles its blocks, which may hold up the first step with a new shape.
    """
    limits = GPU if gpu else CPU
    if not compiles:
        return limits
    return dataclasses.replace(
        limits, silence=max(limits.silence, COMPILATION), hang=max(limits.hang, COMPILATION)
    )

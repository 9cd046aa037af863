"""How long a rank may take to end, and may be silent, by what it computes on. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLimits:
    """Seconds.

    Attributes:
        end: for a killed process to be gone. The driver frees the memory of a GPU first, and the kernel unpins that of
            the host.
        stall: for a place that does not answer though its node does, before it is given up.
        silence: without a beat, after which a gang in training is not taken to be well; at least.
        hang: without a step while beats come, the same; a busy machine may hold up a step for seconds.
        first_silence: without a beat before the first step: some libraries hold the interpreter while they are loaded.
    """

    end: float
    stall: float
    silence: float
    hang: float
    first_silence: float


CPU = DeviceLimits(end=1.0, stall=5.0, silence=2.0, hang=10.0, first_silence=30.0)
GPU = DeviceLimits(end=30.0, stall=90.0, silence=20.0, hang=30.0, first_silence=120.0)
"""80 GB take seconds to free; an allocator that starts again or a network that flaps are no hang. Not measured yet."""
COMPILATION = 60.0
"""Seconds for which a step that meets another shape may compile, where blocks are compiled."""


def limits_of(gpu: float, compiles: bool = False) -> DeviceLimits:
    """The limits of a rank with so many GPUs, which `compiles` what it computes or does not."""
    limits = GPU if gpu else CPU
    if not compiles:
        return limits
    return dataclasses.replace(
        limits, silence=max(limits.silence, COMPILATION), hang=max(limits.hang, COMPILATION)
    )

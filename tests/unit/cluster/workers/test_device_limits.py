"""Limits by device."""

from __future__ import annotations

import dataclasses

from cluster.workers.device_limits import COMPILATION, CPU, GPU, limits_of
from cluster.workers.gang import Bundle


def test_limits_follow_from_the_device() -> None:
    assert Bundle().limits == CPU
    assert Bundle(gpu=1).limits == GPU


def test_a_gpu_is_given_more_time_in_everything() -> None:
    for field in dataclasses.fields(CPU):
        assert getattr(GPU, field.name) > getattr(CPU, field.name)


def test_who_compiles_may_stand_still_for_longer() -> None:
    assert limits_of(0, compiles=True) == dataclasses.replace(CPU, silence=COMPILATION, hang=COMPILATION)
    assert limits_of(1, compiles=True).silence >= COMPILATION

"""A profile made of measurements meets what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.planner import device_profile
from orchestrator.planner.device import Link
from orchestrator.planner.device_profile import load, read, store
from orchestrator.planner.machines import machine_for
from orchestrator.verify.calibrate import (
    ALONE,
    LEAST_DELAY,
    NARROW,
    PAIRED,
    attention_of,
    half_size,
    link_of,
    predicted,
    profile_of,
    with_messages,
)
from orchestrator.verify.calibration_rank import _delay, _ends_soon

CORE = replace(load("cpu-core").machine("fp32"), matrix_share=1.0, launch=4e-5, eager=2.0, delay=0.0)
HALF = replace(CORE, flops=2e11, launch=1.2e-4, eager=5.0)
OPERATORS: dict[str, Any] = {
    "matrix": {
        name: [[[n, n, n], 2 * n**3 / (rate * (n / (n + 16)) ** 3)] for n in (64, 256, 4096)]
        for name, rate in (("fp32", 1e11), ("bf16", 2e11))
    },
    "copy": 1e10,
    "elements": 5e9,
    "attention": [[16, 4 * 16 / 3e10], [64, 4 * 64 / 3e10]],
    "optimizer": 5e9,
}
ALONE_STEPS = [predicted(CORE, asked, layout) for asked, layout in (*ALONE, *NARROW)]
MESSAGES = [(4096, 2e-4), (2**24, 2e-4 + 2**24 / 1e9)]


def test_what_was_measured_is_found_again() -> None:
    steps = [predicted(CORE, asked, layout) for asked, layout in ALONE]
    steps += [predicted(HALF, asked, layout) for asked, layout in NARROW]
    found = profile_of(OPERATORS, MESSAGES, steps, 0.0)
    assert found.delay.value == LEAST_DELAY
    assert found.peak.fp32 == pytest.approx(1e11, rel=0.02)
    assert found.matrix.half_size == pytest.approx(16, rel=0.15)
    machine = replace(found.machine("fp32"), delay=0.0)  # the steps are the least ones
    for (asked, layout), seconds in zip(ALONE, steps[: len(ALONE)], strict=True):
        assert predicted(machine, asked, layout) == pytest.approx(seconds, rel=0.15)
    half = replace(found.machine("bf16"), delay=0.0)
    for (asked, layout), seconds in zip(NARROW, steps[len(ALONE) :], strict=True):
        assert predicted(half, asked, layout) == pytest.approx(seconds, rel=0.15)
    assert half.launch > 2 * machine.launch


def test_steps_in_16_bits_that_take_too_long_are_left_out() -> None:
    """On a processor whose products in 16 bits are much slower; one that was measured alone tells too little."""
    alone = [predicted(CORE, asked, layout) for asked, layout in ALONE]
    slow = [predicted(HALF, *NARROW[0]), *[None] * (len(NARROW) - 1)]
    found = profile_of(OPERATORS, MESSAGES, [*alone, *slow], 0.0)
    assert found.narrow is not None
    assert (found.narrow.launch, found.narrow.eager) == (found.launch.value, found.eager.value)
    (first, _), (largest, _) = NARROW[0], NARROW[3]
    assert [_ends_soon(asked, {"fp32": 1e11, "bf16": 3e9}) for asked in (first, largest)] == [True, False]
    assert _ends_soon(largest, {})


def test_a_cache_may_be_faster_than_the_memory() -> None:
    """It holds the state of a small model; no share of a bandwidth is more than all of it."""
    found = profile_of({**OPERATORS, "optimizer": 3e10}, MESSAGES, ALONE_STEPS, 0.0)
    assert (found.memory_bandwidth.value, found.optimizer_share.value) == (3e10, 1.0)
    assert found.element_share.value == pytest.approx(5e9 / 3e10)


@pytest.mark.slow
def test_messages_are_fitted_to_steps_of_two_processes() -> None:
    core = replace(CORE, collective=8e-4, message=2e-3, inside=Link(1e-4, 5e8), crowding=1.4, delay=0.2)
    steps = [predicted(core, asked, layout) for asked, layout in PAIRED]
    alone = profile_of(OPERATORS, MESSAGES, ALONE_STEPS, 0.2)
    machine = with_messages(alone, steps).machine("fp32")
    assert machine.delay == 0.2
    for (asked, layout), seconds in zip(PAIRED, steps, strict=True):
        assert predicted(machine, asked, layout) == pytest.approx(seconds, rel=0.2)
    assert machine.collective == pytest.approx(8e-4, rel=0.3)
    assert machine.message == pytest.approx(2e-3, rel=0.3)
    assert machine.crowding == pytest.approx(1.4, abs=0.11)
    assert machine.inside.latency == pytest.approx(1e-4)


def test_passes_of_bytes_are_never_less_than_one() -> None:
    """As a profile has them, however fast the steps were that a busy machine has measured beside its operators."""
    found = profile_of(OPERATORS, MESSAGES, [1e-4] * len(ALONE_STEPS), 0.0)
    assert found.narrow is not None
    assert found.eager.value == found.narrow.eager == 1.0


def test_the_mean_delay_is_read_off_few_steps() -> None:
    drawn = np.random.default_rng(1).exponential(0.03, size=(4000, 5)) + 0.1
    found = [_delay(list(steps)) * min(steps) for steps in drawn]
    assert float(np.mean(found)) == pytest.approx(0.03, rel=0.03)


def test_a_link_is_read_off_two_messages() -> None:
    latency, bandwidth = link_of(MESSAGES)
    assert (latency, bandwidth) == (pytest.approx(1e-4), pytest.approx(1e9))


def test_what_a_score_takes_beside_its_products_is_told_apart() -> None:
    found = attention_of([(size, 2e-9 + 4 * size / 2.5e10) for size in (16, 64)], 1e11)
    assert found == {"share": pytest.approx(0.25), "score_seconds": pytest.approx(2e-9)}
    assert attention_of([(16, 64 / 5e10), (64, 256 / 5e10)], 1e11)["score_seconds"] == pytest.approx(
        0, abs=1e-12
    )


def test_products_without_a_loss_have_no_half_size() -> None:
    assert half_size([((64, 64, 64), 1e11), ((512, 512, 512), 1e11)], 1e11) < 1


def test_what_is_stored_is_what_plans_here_use(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "machine.yaml"
    store(load("cpu-core"), path)
    assert read(path) == load("cpu-core")
    assert [entry.name for entry in path.parent.iterdir()] == ["machine.yaml"]
    monkeypatch.setattr(device_profile, "stored_at", lambda: path)
    from cluster.workers.gang import Bundle
    from cluster.workers.machine import Offer

    found = machine_for(Offer(7e9), Bundle(2))
    assert (found.memory, found.name) == (7e9, "cpu-core")
    assert found.full_flops == 2 * load("cpu-core").peak.fp32


def test_a_user_without_a_home_has_no_stored_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert device_profile.stored_at() is None
    assert device_profile.calibrated() is None

"""Energy as far as it was measured, the rest estimated, and said which."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.resources import PerWorker
from orchestrator.observe.energy import PUE, Measured, energy_of, measured

GPU_WORKER = PerWorker(cpu=10, gpu=1)


def row(node: str, attempt: int = 1, **values: float) -> dict[str, Any]:
    return {"attempt": attempt, "node": node, "values": {"interval_seconds": 1800.0, **values}}


def test_what_every_node_tells_is_summed_and_what_one_does_not_is_left_out() -> None:
    rows = [row("a", gpu_joules=5.0, cpu_joules=1.0), row("b", gpu_joules=7.0), row("a", 2, gpu_joules=1.0)]
    found = measured(rows)
    assert found.joules == {"gpu_joules": 13.0}
    assert found.seconds == 3600.0, "of two nodes beside each other, then of one"
    assert measured([]) == Measured()


def test_nothing_measured_is_an_estimate_and_says_so() -> None:
    found = energy_of(GPU_WORKER, 4.0, 7200.0, Measured())
    assert found["kwh"] == pytest.approx(4 * (10 * 12 + 700) * PUE / 1000)
    assert found["energy_source"] == "estimated"


def test_a_part_of_the_time_is_measured_and_the_rest_estimated() -> None:
    """One of two worker hours: 0.5 kWh of its GPU were measured."""
    found = energy_of(GPU_WORKER, 2.0, 7200.0, Measured({"gpu_joules": 1.8e6}, 3600.0))
    assert found["kwh"] == pytest.approx((0.5 + 0.5 * 2 * 0.7 + 2 * 0.12) * PUE)
    assert found["energy_source"] == "CPUs estimated, GPUs measured by NVML"
    assert "during 50% of the time" in found["energy_basis"]


def test_a_worker_without_a_gpu_is_measured_by_its_processors() -> None:
    found = energy_of(PerWorker(cpu=4), 1.0, 3600.0, Measured({"cpu_joules": 3.6e5}, 3600.0))
    assert found["kwh"] == pytest.approx(0.1 * PUE)
    assert found["energy_source"] == "CPUs measured by RAPL"

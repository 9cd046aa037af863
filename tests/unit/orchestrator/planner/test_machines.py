"""What a worker offers to a plan."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer
from orchestrator.config.errors import InputError
from orchestrator.planner import machines
from orchestrator.planner.device_profile import load, names
from orchestrator.planner.machines import machine_for, machine_notes, probe


def test_a_gpu_is_known_by_its_name() -> None:
    h100 = machine_for(Offer(1e12, "H100"), Bundle(1, 1))
    assert (h100.memory, h100.flops, h100.name) == (80e9, 989e12, "h100")


def test_its_memory_is_what_its_driver_says() -> None:
    large = machine_for(Offer(1e12, "NVIDIA A100-SXM4-80GB", 85e9), Bundle(1, 1))
    assert (large.memory, large.name) == (85e9, machine_for(Offer(1e12, "A100-80G"), Bundle(1, 1)).name)
    unknown = machine_for(Offer(1e12, "NVIDIA Z9", 99e9), Bundle(1, 1))
    assert machine_notes(unknown, "bf16") == [
        "no profile of NVIDIA Z9 is known; all predictions are for the t4 with 99 GB instead"
    ]


@pytest.mark.parametrize("offer", [None, Offer(1e12, "Z9")])
def test_an_unknown_gpu_is_the_smallest_known(offer: Offer | None) -> None:
    smallest = min(
        (load(name) for name in names() if load(name).kind == "cuda"), key=lambda p: p.memory.value
    )
    found = machine_for(offer, Bundle(1, 1))
    assert found.name == smallest.name
    assert machine_notes(found, "bf16") == [
        f"no profile of {offer.accelerator if offer else 'a GPU without a name'} is known; all predictions are for the "
        "t4 with 16 GB instead"
    ]


def test_a_gpu_of_this_machine_is_known_by_what_its_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines.Nvml, "names", lambda nvml: ["NVIDIA H200", "NVIDIA H200"])
    found = machine_for(None, Bundle(1, 1))
    assert (found.name, machine_notes(found, "bf16")) == ("h200", [])


def test_processors_are_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machines, "probe", lambda cpu: asked.append(cpu) or 5e9)
    monkeypatch.setattr(machines, "calibrated", lambda: None)
    found = machine_for(Offer(3e9), Bundle(2))
    assert found.memory == 3e9
    assert found.full_flops * found.matrix_share == pytest.approx(5e9)
    assert machine_for(None, Bundle(2)).memory > 2**28
    assert asked == [2, 2]


@pytest.mark.parametrize(
    ("flags", "precision", "has"),
    [
        ("fpu sse2 avx avx2 f16c", "bf16", False),
        ("fpu avx2 avx512f avx512bw avx512vl", "bf16", True),
        ("fpu avx2 avx512f avx512bw avx512vl", "fp16", False),
        ("avx512bw avx512_bf16 amx_bf16 avx512_fp16", "fp16", True),
        ("fp asimd asimdhp bf16", "bf16", True),
        (None, "bf16", False),
    ],
)
def test_a_processor_without_instructions_for_16_bits_is_slow_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, precision: str, has: bool
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"model name\t: A Processor\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machines, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machines, "probe", lambda cpu: 5e9)
    monkeypatch.setattr(machines, "calibrated", lambda: None)
    found, whole = machine_for(Offer(3e9), Bundle(1), precision), machine_for(Offer(3e9), Bundle(1))
    assert (found.flops > found.full_flops) == has
    assert bool(machine_notes(found, precision)) != has
    assert (machine_notes(whole, "fp32"), whole.full_flops) == ([], found.full_flops)


def test_products_in_8_bits_are_of_the_devices_that_have_them() -> None:
    """A GPU that is not known counts in bf16; a processor is said to have none."""
    h100 = machine_for(Offer(8e10, "H100"), Bundle(1, 1), "fp8")
    assert h100.eight_bit_flops == 2 * h100.flops + 1e12
    assert h100.matrix(8192, 4096, 4096, 1.0) < 0.6 * h100.matrix(8192, 4096, 4096, 2.0)
    with pytest.raises(
        InputError, match=r"train.precision: NVIDIA A100 .* has no FP8 matrix multiplication; set it to bf16"
    ):
        machine_for(Offer(8e10, "A100"), Bundle(1, 1), "fp8")
    unknown = machine_for(Offer(8e10, "RTX9090"), Bundle(1, 1), "fp8")
    assert (unknown.stands_for, unknown.eight_bit_flops) == ("RTX9090", 0.0)
    core = load("cpu-core").machine("fp8")
    assert core.matrix(64, 64, 64, 1.0) <= core.matrix(64, 64, 64, 2.0)
    (line,) = machine_notes(core, "fp8")
    assert "no FP8 matrix multiplication" in line


def test_the_measurement_is_a_rate() -> None:
    rate = probe(1)
    assert math.isfinite(rate)
    assert 1e7 < rate < 1e14

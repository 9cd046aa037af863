"""What is read of a node, where the machine tells and where it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.workers import node_metrics
from cluster.workers.node_metrics import CPU_JOULES, GPU_JOULES, NodeMetrics, Rapl
from cluster.workers.nvml import Nvml

DRIVER = """
#include <string.h>
static unsigned long long energy = 1000000;  // mJ
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1ul); return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 80000000000ull; memory[1] = 60000000000ull; memory[2] = 20000000000ull; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { rates[0] = 93; rates[1] = 40; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 350000; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
    *milliwatts = 700000; return device == (void *)2; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = energy += 5000; return 0; }
"""
"""Two GPUs, the second of which does not tell its limit; each asking costs 5 J."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the functions of the driver's."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "nvml.so", "nvml.c"], cwd=folder, check=True)
    return str(folder / "nvml.so")


def zone(folder: Path, name: str, of: str, microjoules: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "name").write_text(f"{of}\n")
    (folder / name / "max_energy_range_uj").write_text("262143328850\n")
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")


def test_the_names_are_those_of_mlflow(driver: str, tmp_path: Path) -> None:
    """But for the joules, and the seconds that they are of."""
    pytest.importorskip("mlflow")
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    theirs = set()
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        theirs |= set(monitor.aggregate_metrics())
    gpu = {"memory_usage_percentage", "memory_usage_megabytes", "utilization_percentage", "power_usage_watts"}
    theirs |= {f"gpu_{number}_{key}" for number in (0, 1) for key in gpu} | {"gpu_0_power_usage_percentage"}
    found = NodeMetrics(driver, str(tmp_path)).read()
    assert set(found) == theirs | {GPU_JOULES, node_metrics.SECONDS}
    assert (found["gpu_0_memory_usage_percentage"], found["gpu_1_power_usage_watts"]) == (25.0, 350.0)
    assert found["gpu_0_power_usage_percentage"] == 50.0
    assert 0 < found["system_memory_usage_percentage"] < 100
    assert 0 < found["disk_usage_percentage"] <= 100


def test_energy_is_what_was_taken_since_the_reading_before(driver: str, tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 262_143_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 7_000_000)  # a part of the package
    zone(tmp_path, "intel-rapl:0:2", "dram", 1_000_000)
    read = NodeMetrics(driver, str(tmp_path))
    zone(tmp_path, "intel-rapl:0", "package-0", 1_671_150)  # the counter has begun anew
    zone(tmp_path, "intel-rapl:0:0", "core", 900_000_000)
    zone(tmp_path, "intel-rapl:0:2", "dram", 4_000_000)
    first, second = read.read(), read.read()
    assert first[CPU_JOULES] == pytest.approx(2.0 + 3.0, abs=1e-3)
    assert second[CPU_JOULES] == 0.0
    assert first[GPU_JOULES] == second[GPU_JOULES] == 20.0


def test_gpus_have_the_names_that_their_driver_tells(driver: str) -> None:
    assert Nvml(driver).names() == ["NVIDIA H100 80GB HBM3"] * 2


def test_a_machine_that_does_not_tell_is_left_out(tmp_path: Path) -> None:
    assert Nvml("no-such-library.so").read() == Nvml("no-such-library.so").names() == []
    assert Rapl(str(tmp_path)).joules() is None
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    counters = Rapl(str(tmp_path))
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as where root alone may read it
    assert counters.joules() is None
    found = NodeMetrics("no-such-library.so", str(tmp_path / "none")).read()
    assert not {CPU_JOULES, GPU_JOULES} & found.keys()


def test_readings_become_rarer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(node_metrics.time, "monotonic", lambda: now[0])
    read = NodeMetrics("none.so", str(tmp_path))
    pauses = []
    for now[0] in (0.0, 299.0, 600.0, 86400.0):
        pauses.append(read.pause)
    assert pauses == [5.0, 5.0, 10.0, 60.0]

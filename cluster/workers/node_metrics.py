"""Metrics of the node under a rank: CPUs, memory, GPUs, network, disk and energy.

The names are those of MLflow's system metrics, so its page shows them. All figures are for the whole node, including
other programs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from cluster.workers.nvml import LIBRARY, GpuReading, Nvml

FIRST_INTERVAL = 5.0
"""Seconds between the first readings."""
LONGEST_INTERVAL = 60.0
"""The longest time between two readings, in seconds."""
PART = 1 / 60
"""Between these bounds, the interval is this part of the time since the first reading."""
RAPL = "/sys/class/powercap"
"""The folder of the kernel's energy counters of CPUs (Running Average Power Limit). Often only root may read them."""
CPU_JOULES, GPU_JOULES = "cpu_joules", "gpu_joules"
"""Keys of the energy since the last reading: of CPU packages and memory by RAPL, and of GPUs by NVML."""
SECONDS = "interval_seconds"
"""The key of the seconds since the last reading."""
MEGA = 1e6


class NodeMetrics:
    """Reads the node's state. Use it from one thread; a driver may never answer."""

    def __init__(self, nvml: str = LIBRARY, rapl: str = RAPL) -> None:
        self._nvml = Nvml(nvml)
        self._rapl = Rapl(rapl)
        psutil.cpu_percent()  # each call measures the time since the last one
        self._began = time.monotonic()
        self._last = self._began
        self._network = psutil.net_io_counters()
        self._gpu_energy = _energy(self._nvml.read())
        self._rapl.joules()

    @property
    def pause(self) -> float:
        """Seconds until the next reading is due."""
        return min(max(FIRST_INTERVAL, PART * (time.monotonic() - self._began)), LONGEST_INTERVAL)

    def read(self) -> dict[str, float]:
        """Return a reading: percentages, megabytes (10^6 bytes), watts, and joules since the last reading."""
        return {key: round(value, 3) for key, value in self._read().items()}

    def _read(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(os.sep)
        network = psutil.net_io_counters()
        gpus = self._nvml.read()
        result = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGA,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / MEGA,
            "disk_available_megabytes": disk.free / MEGA,
        }
        if network and self._network:  # a machine may have no interface
            received = network.bytes_recv - self._network.bytes_recv
            result["network_receive_megabytes"] = received / MEGA
            result["network_transmit_megabytes"] = (network.bytes_sent - self._network.bytes_sent) / MEGA
        for number, gpu in enumerate(gpus):
            result |= {f"gpu_{number}_{key}": value for key, value in _of(gpu).items()}
        now = time.monotonic()
        result[SECONDS], self._last = now - self._last, now
        if (joules := self._rapl.joules()) is not None:
            result[CPU_JOULES] = joules
        before, self._gpu_energy = self._gpu_energy, _energy(gpus)
        if before is not None and self._gpu_energy is not None:
            result[GPU_JOULES] = max(self._gpu_energy - before, 0.0)
        return result


def _of(gpu: GpuReading) -> dict[str, float]:
    result: dict[str, float | None] = {
        "memory_usage_megabytes": None if gpu.used is None else gpu.used / MEGA,
        "utilization_percentage": gpu.utilization,
        "power_usage_watts": gpu.watts,
    }
    if gpu.used is not None and gpu.total:
        result["memory_usage_percentage"] = gpu.used / gpu.total * 100
    if gpu.watts is not None and gpu.watts_limit:
        result["power_usage_percentage"] = gpu.watts / gpu.watts_limit * 100
    return {key: value for key, value in result.items() if value is not None}


def _energy(gpus: list[GpuReading]) -> float | None:
    """Joules of all GPUs since their drivers were loaded; None without GPUs, or if a driver does not say."""
    result = [gpu.energy for gpu in gpus if gpu.energy is not None]
    return sum(result) if gpus and len(result) == len(gpus) else None


class Rapl:
    """The energy counters of the CPU packages and of their memory."""

    def __init__(self, folder: str) -> None:
        self._zones: list[tuple[Path, float]] = []
        """The counter of each zone, and the joules at which it wraps around."""
        self._last: dict[Path, float] = {}
        for zone in sorted(Path(folder).glob("*-rapl:*")):
            try:
                name = (zone / "name").read_text().strip()
                if name.startswith("package") or name == "dram":  # other zones are parts or sums of these
                    largest = float((zone / "max_energy_range_uj").read_text()) / MEGA
                    self._zones.append((zone / "energy_uj", largest))
            except (OSError, ValueError):
                continue

    def joules(self) -> float | None:
        """Return the joules since the last call, 0 at the first; None if the counters cannot be read."""
        total = 0.0
        for counter, largest in self._zones:
            try:
                now = float(counter.read_text()) / MEGA
            except (OSError, ValueError):
                return None
            passed = now - self._last.get(counter, now)
            # A counter wraps around at `max_energy_range_uj`, which takes minutes under load; readings are closer than
            # that.
            total += passed if passed >= 0 else passed + largest
            self._last[counter] = now
        return total if self._zones else None

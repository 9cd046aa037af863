"""NVIDIA's management library, which comes with the driver: load, memory, power and energy of this node's GPUs."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE, which includes the final zero byte."""


class GpuReading(NamedTuple):
    """The present state of one GPU; None for values that its driver does not provide.

    `used` and `total` are in bytes, `utilization` is in percent. `energy` is in joules since the driver was loaded.
    """

    used: float | None
    total: float | None
    utilization: float | None
    watts: float | None
    watts_limit: float | None
    energy: float | None


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Nvml:
    """The GPUs of this node; none without a driver. Signatures are as in nvml.h."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            return
        count = ctypes.c_uint()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for number in range(count.value):
            device = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
                self._devices.append(device)

    def names(self) -> list[str]:
        """Return the names of the GPUs that the driver provides, such as "NVIDIA H100 80GB HBM3"."""
        result = []
        for device in self._devices:
            name = ctypes.create_string_buffer(NAME_BYTES)
            if not self._library.nvmlDeviceGetName(device, name, NAME_BYTES):
                result.append(name.value.decode(errors="replace"))
        return result

    def read(self) -> list[GpuReading]:
        """Return a reading of each GPU, by its index."""
        return [self._read(device) for device in self._devices]

    def _read(self, device: ctypes.c_void_p) -> GpuReading:
        memory = self._ask("nvmlDeviceGetMemoryInfo", device, _Memory())
        busy = self._ask("nvmlDeviceGetUtilizationRates", device, _Utilization())
        watts = self._ask("nvmlDeviceGetPowerUsage", device, ctypes.c_uint())
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", device, ctypes.c_uint())
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.c_ulonglong())
        return GpuReading(
            None if memory is None else float(memory.used),
            None if memory is None else float(memory.total),
            utilization=None if busy is None else float(busy.gpu),
            watts=None if watts is None else watts.value / 1000,
            watts_limit=None if limit is None else limit.value / 1000,
            energy=None if energy is None else energy.value / 1000,
        )

    def _ask(self, function: str, device: ctypes.c_void_p, answer: Any) -> Any:
        """Return the answer; None if the GPU gives none."""
        return None if getattr(self._library, function)(device, ctypes.byref(answer)) else answer

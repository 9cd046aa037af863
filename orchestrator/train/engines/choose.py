"""The choice of the engine."""

from __future__ import annotations

from orchestrator.config.spec import JobSpec
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.engine import Engine
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.workload import Workload


def make_engine(spec: JobSpec, workload: Workload, layout: Layout, device: Device, base: str = "") -> Engine:
    """The engine that the layout names; `base` as in `TorchEngine`. Raises InputError if what it needs is not
    installed."""
    if layout.engine == "deepspeed":  # imported here because it takes seconds
        from orchestrator.train.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, workload, layout, device)
    return TorchEngine(spec, workload, layout, device, base)

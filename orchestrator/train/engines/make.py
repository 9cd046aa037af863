"""The engine that a layout names."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.engine import Engine
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads import load as _load  # noqa: F401  (imported before the fork, so that ranks start sooner)
from workloads.adapters.frozen import after
from workloads.workload import Workload


def make_engine(
    config: EngineConfig, workload: Workload, layout: Layout, device: Device, base: str = ""
) -> Engine:
    """Return the engine that the layout names.

    Args:
        config: how to compute a step.
        workload: the model and its objective.
        layout: how the ranks divide the work; it names the engine.
        device: this rank's device.
        base: checksum of the base weights, see `TorchEngine`.

    Raises:
        InputError: if a package that the engine needs is not installed.
    """
    if layout.engine == "deepspeed":  # imported on demand, because it takes seconds
        from orchestrator.train.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(config, workload, layout, device)
    return TorchEngine(config, workload, layout, device, base)


@dataclass(frozen=True)
class EngineMaker:
    """Makes the engines of a rank, one for each set of parameters that a run trains.

    Attributes:
        config: how to compute a step.
        workload: the model and its objective.
        layout: how the ranks divide the work.
        device: this rank's device.
        base: checksum of the base weights, see `TorchEngine`.
        teacher: the model that is learned from in every step, with the checksum of its weights; None without one.
    """

    config: EngineConfig
    workload: Workload
    layout: Layout
    device: Device
    base: str
    teacher: tuple[Workload, str] | None

    def __call__(self, step: int) -> Engine:
        """Return the engine that continues after `step` steps. It holds the reference model and the teacher."""
        with self.device.long_lived():
            workload = after(self.workload, step)
            engine = make_engine(self.config, workload, self.layout, self.device, self.base)
            if self.config.train.reference == "held":
                engine.hold_reference(self.config.seed)
            if self.teacher is not None:
                engine.hold_teacher(*self.teacher)
        return engine

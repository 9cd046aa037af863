"""How the micro-batches of a step are run: through a pipeline, compared with each other, or one after the other."""

from __future__ import annotations

from torch import nn

from orchestrator.parallel.accumulation import Accumulation
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parameter_shard import DataParallel
from orchestrator.parallel.pipeline import Pipeline
from orchestrator.parallel.step_clock import StepClock
from orchestrator.parallel.whole_batch import WholeBatch
from workloads.own.model import OwnWorkload
from workloads.workload import Workload

Runner = Accumulation | Pipeline | WholeBatch


def runner_of(
    stages: list[nn.Module],
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    data: DataParallel,
    losses: StepLosses,
    device: Device,
    clock: StepClock,
) -> Runner:
    """What runs the stages of this rank."""
    if layout.pp > 1:
        return Pipeline(stages, workload, layout, mesh, losses, device, clock)
    if isinstance(workload, OwnWorkload) and workload.compares:
        return WholeBatch(stages[0], workload, mesh, data, losses, device, clock)
    return Accumulation(stages[0], data, losses, device, clock)

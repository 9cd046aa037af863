"""The losses of an engine's steps, from what the engine reads of the job."""

from __future__ import annotations

from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.arithmetic import Arithmetic
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.train.engines.config import EngineConfig
from workloads.workload import Workload


def losses_of(
    config: EngineConfig, workload: Workload, layout: Layout, mesh: Mesh, device: Device
) -> StepLosses:
    """Return the losses of a workload under a layout.

    Args:
        config: what the engine reads of the job.
        workload: the model and its objective.
        layout: how the ranks divide the work.
        mesh: the process groups of the layout.
        device: this rank's device.
    """
    return StepLosses(
        workload,
        layout,
        mesh,
        device,
        global_batch=config.train.global_batch,
        sequence_length=config.sequence_length,
        z_loss=config.train.z_loss,
        label_smoothing=config.train.label_smoothing,
        distill=config.distill,
        own_metrics=config.evaluate.own_metrics if config.evaluate else (),
        keeps_predictions=bool(config.evaluate and config.evaluate.of_predictions),
    )


def arithmetic_in(reader: Reader) -> Arithmetic:
    """Return the order in which the run of a commit adds numbers."""
    return Arithmetic.from_meta(reader.manifest.meta)

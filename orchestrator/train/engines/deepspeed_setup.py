"""What DeepSpeed is started with: its configuration, the model with its loss, and the optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import groups_of, rates_of
from orchestrator.parallel.device import Device
from orchestrator.parallel.divided_model import freeze
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.low_precision import fake_quantise, multiply_in_8_bits
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.partition import cut_of
from orchestrator.parallel.recompute import recompute
from orchestrator.train.config import TrainSpec
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.deepspeed_library import compile_once, open_deepspeed
from workloads.model.scheme import Scheme
from workloads.workload import Batch, Workload

BUCKET = 50_000_000
"""Maximum elements whose gradients are reduced together."""


class DeepSpeedParts(NamedTuple):
    """What `start_deepspeed` makes.

    Attributes:
        model: this rank's part of the model.
        engine: DeepSpeed's engine, which runs the model.
        zero: its ZeRO optimizer.
    """

    model: nn.Module
    engine: Any
    zero: Any


def start_deepspeed(
    config: EngineConfig,
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    device: Device,
    losses: StepLosses,
) -> DeepSpeedParts:
    """Build the model and its optimizer, and hand them to DeepSpeed.

    Args:
        config: how to compute a step.
        workload: the model and its objective.
        layout: how the ranks divide the work.
        mesh: the process groups of the layout.
        device: this rank's device.
        losses: the loss of a micro-batch.

    Raises:
        InputError: DeepSpeed is not installed, or an operator of it does not compile.
    """
    deepspeed = open_deepspeed(device.device)
    elements = sum(shape.numel() for shape in workload.shapes.values())
    deepspeed_config = settings(config.train, config.gpus, layout, elements, workload.config.hidden)
    model = build_model(
        deepspeed,
        workload,
        layout=layout,
        device=device.device,
        config=deepspeed_config,
        in_8_bits=config.train.dtype == "fp8",
        scheme=config.quantize.scheme if config.quantize else None,
    )
    recompute(workload.blocks(model), layout, config.train.compile)
    optimizer = optimizer_of(config.train.optimizer, model, workload, mesh, layout.offload != "none")
    engine, zero, _, _ = deepspeed.initialize(
        model=ModelWithLoss(model, losses, device),
        optimizer=optimizer,
        config=deepspeed_config,
        dist_init_required=False,
    )
    return DeepSpeedParts(model, engine, zero)


def settings(train: TrainSpec, on_gpu: float, layout: Layout, elements: int, hidden: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model of `elements` parameters and width `hidden`.

    It sets every option whose default differs from the torch engine.

    Args:
        train: batch and clipping.
        on_gpu: number of GPUs per worker, 0 or 1.
        layout: ZeRO stage, micro-batch and offload.
        elements: number of the model's parameters.
        hidden: width of the model.
    """
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "overlap_comm": False,
        "contiguous_gradients": True,
        # the bucket is allocated in full; the default takes 2 GB even for the smallest model
        "reduce_bucket_size": min(elements, BUCKET),
        # under ZeRO 3 every rank keeps the vectors, and gathers matrices for their use
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    host = {"device": "cpu", "pin_memory": bool(on_gpu)}
    if layout.offload != "none":
        zero["offload_optimizer"] = host
    if layout.offload == "parameters":
        zero["offload_param"] = host
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation(train.global_batch),
        # DeepSpeed's default is 1.0, not "off".
        "gradient_clipping": train.optimizer.clip or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }


def optimizer_of(
    spec: OptimizerSpec, model: nn.Module, workload: Workload, mesh: Mesh, offload: bool
) -> torch.optim.Optimizer:
    """Return AdamW over the full parameters, grouped by `groups_of`; DeepSpeed replaces them with its partitions.

    With offload it is DeepSpeed's AdamW for CPUs (Ren et al., 2021, section 5).

    Args:
        spec: the job's optimizer.
        model: its trained parameters are updated.
        workload: says which parameters are matrices, and the rate of each.
        mesh: the process groups of the layout.
        offload: whether the update runs on the host.
    """
    rate = rates_of(spec, workload)
    styles = workload.sharding()
    shapes = workload.shapes
    stacks = workload.stacks
    groups = groups_of(
        spec,
        [
            (p, cut_of(name, shapes[name], styles, mesh, stacks).matrix, rate(name))
            for name, p in model.named_parameters()
            if p.requires_grad
        ],
    )
    if not offload:
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compile_once("cpu_adam", CPUAdamBuilder().load)
    return DeepSpeedCPUAdam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adamw_mode=True)


def build_model(
    deepspeed: Any,
    workload: Workload,
    layout: Layout,
    device: torch.device,
    config: dict[str, Any],
    in_8_bits: bool,
    scheme: Scheme | None,
) -> nn.Module:
    """Return the model with uninitialised memory. Under ZeRO 3 each rank holds only its part.

    There the full model is first allocated in host memory that is never touched, which costs nothing. It then passes
    through the device one parameter at a time.

    Args:
        deepspeed: the library.
        workload: the model and its objective.
        layout: how the ranks divide the work.
        device: this rank's device.
        config: DeepSpeed's configuration.
        in_8_bits: whether blocks multiply in 8 bits.
        scheme: how trained weights are rounded; None if they are not.
    """
    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device="cpu" if layout.zero == 3 else device)
    model.train()
    freeze(model, workload)
    if in_8_bits:  # before ZeRO 3 replaces the weights by flat parts
        multiply_in_8_bits(workload.blocks(model))
    if scheme is not None:
        fake_quantise(model, workload, scheme)
    if layout.zero == 3:
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    return model


class ModelWithLoss(nn.Module):
    """The model and its loss as one module. DeepSpeed wraps a module whose output is the loss of a micro-batch."""

    def __init__(self, model: nn.Module, losses: StepLosses, device: Device) -> None:
        super().__init__()
        self.model = model
        self._losses = losses
        self._device = device

    def forward(self, batch: Batch, parts: int) -> Tensor:
        """Return the loss of a micro-batch, an fp32 scalar.

        Args:
            batch: a micro-batch on this rank's device, [B, ...] each.
            parts: number of micro-batches of a rank in a step.
        """
        with self._device.autocast():
            output = self.model(batch, in_chunks=self._losses.in_chunks(batch))
            return self._losses.of(output, batch, parts)

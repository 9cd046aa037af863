"""The DeepSpeed engine: ZeRO 1, 2 and 3 and ZeRO-Offload (Rajbhandari et al., 2020; Ren et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.spec import JobSpec
from orchestrator.optim.optimizers import rates_of, set_lr
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums, StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parallelize import freeze, multiply_in_8_bits, recompute
from orchestrator.parallel.partition import cut_of
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.step_clock import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, StepClock
from orchestrator.train.engines.deepspeed_setup import open_deepspeed, optimizer_of, settings
from orchestrator.train.engines.deepspeed_state import Fragment, Partitions, frozen_fragments
from orchestrator.train.engines.engine import Metrics
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.state import committed_shapes, initialise
from orchestrator.train.progress import CHUNKS_HEAD
from workloads.workload import Batch, Workload


class DeepSpeedEngine:
    """See `Engine`. DeepSpeed keeps weights, gradients and optimiser state; losses, counts and commits are this
    project's.

    Gradients are sums over tokens. The number of predicted tokens is known only at the step; it is then given to
    DeepSpeed as its loss scale, by which it divides before it clips.
    """

    def __init__(self, spec: JobSpec, workload: Workload, layout: Layout, device: Device) -> None:
        self._workload, self._layout, self._device = workload, layout, device
        self._seed = spec.seed
        self.clock = StepClock(device.device)
        self._mesh = Mesh(layout, self.clock)
        self._losses = StepLosses(spec, workload, layout, self._mesh, device)
        self._routing = RouterLoad(workload, self._mesh, device.device)
        self._scale = LossScale(spec.train.dtype == "fp16")
        deepspeed = open_deepspeed(device.device)
        elements = sum(shape.numel() for shape in workload.shapes.values())
        config = settings(spec, layout, elements, workload.config.hidden)
        self.model = _build(deepspeed, workload, layout, device.device, config, spec.train.dtype == "fp8")
        recompute(workload.blocks(self.model), layout, spec.train.compile)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        rate = rates_of(spec.train.optimizer, workload)
        styles, shapes, stacks = workload.sharding(), workload.shapes, workload.stacks
        scaled = [
            (p, cut_of(name, shapes[name], styles, self._mesh, stacks).matrix, rate(name))
            for name, p in trained.items()
        ]
        optimizer = optimizer_of(spec.train.optimizer, scaled, layout.offload != "none")
        step = _WithLoss(self.model, self._losses, device)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=step, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._partitions = Partitions(self._zero, layout.zero, trained, spec.checkpoint.ema)
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        self._frozen = list(frozen_fragments(frozen, self._mesh.rank))
        self._buffers = {n: b for n, b in self.model.named_buffers() if n in workload.shapes}

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> Metrics:
        """See `Engine.train_step`."""
        if self._losses.has_baseline:
            self.take_baseline(self.eval_step(micro_batches))
        self._losses.begin(micro_batches)
        self._losses.scale, self._zero.loss_scale = self._scale.value, 1.0
        for number, batch in enumerate(micro_batches, start=1):
            self.clock.switch(FORWARD)
            part = self._engine(self._losses.prepare(batch), len(micro_batches))
            self.clock.switch(BACKWARD)
            self._engine.backward(part, scale_wrt_gas=False)
            if number < len(micro_batches):
                self._engine.step()  # counts the micro-batch
        self.clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        loss, extra, count, _ = self._losses.over_ranks(torch.zeros(()))
        routed = self._routing.take([self.model])
        extra = {**extra, **ratios(routed)}
        if self._scale.enabled:
            extra = {**extra, "loss_scale": self._scale.value, "skipped": 0.0}
        # DeepSpeed has divided the sums by the number of ranks
        self._zero.loss_scale = self._scale.value * count / (self._losses.expected * self._layout.dp)
        set_lr(self._zero.param_groups, lr)
        self.clock.switch(OPTIMIZER)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._zero.overflow or not math.isfinite(norm):
            # every rank has the same norm, so that all skip the step or all fail
            if self._scale.overflow():
                return Metrics(loss, 0.0, {**extra, "skipped": 1.0})
            return Metrics(loss, math.nan, extra)
        self._scale.succeed()
        self._partitions.average.update()
        self._workload.balance(self.model, routed)
        return Metrics(loss, norm, extra)

    @torch.no_grad()
    def poison(self) -> None:
        """See `Engine.poison`. Under ZeRO 3 a rank's partition of a parameter is in `ds_tensor`."""
        for parameter in self.model.parameters():
            getattr(parameter, "ds_tensor", parameter).data.fill_(math.nan)

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        self._losses.begin_evaluation()
        self._evaluate(micro_batches)
        return self._losses.evaluated(self._routing.take([self.model]))

    def take_baseline(self, sums: EvaluationSums) -> None:
        """See `Engine.take_baseline`."""
        self._losses.take_baseline(sums)

    @torch.no_grad()
    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        self._losses.begin_prediction()
        self._evaluate(micro_batches)
        self._routing.take([self.model])
        return self._losses.predicted()

    @torch.no_grad()
    def hold_reference(self, seed: int) -> None:
        """See `Engine.hold_reference`; refused by the rules of engines."""
        raise NotImplementedError("DeepSpeed holds no reference")

    @torch.no_grad()
    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take([self.model])
        return self._losses.said()

    def _evaluate(self, micro_batches: Sequence[Batch]) -> None:
        self._engine.eval()
        for batch in micro_batches:
            self._engine(self._losses.prepare(batch), len(micro_batches))
        self._engine.train()

    @torch.no_grad()
    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self._partitions.average.swap()
        self._partitions.publish()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Engine.initialise`."""
        self._begin([*self._partitions.fragments, *self._frozen], seed)
        for name, buffer in self._buffers.items():
            buffer.copy_(self._workload.initial(name, seed))
        self._partitions.begin(0)
        self._partitions.average.begin()
        self._partitions.publish()

    def state(self) -> Iterator[TensorPiece]:
        """See `Engine.state`."""
        yield from self._partitions.pieces()
        if self._mesh.rank == 0:
            yield from (full_piece(f"model.{name}", buffer) for name, buffer in self._buffers.items())
            yield full_piece("optim.step", torch.tensor(self._partitions.steps, dtype=torch.int64))
            yield from self._scale.pieces()

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        reader.manifest.check_shapes(committed_shapes(self._workload))
        self._begin(self._frozen, self._seed)
        self._partitions.restore(reader)
        for name, buffer in self._buffers.items():
            buffer.copy_(reader.read(f"model.{name}"))
        self._scale.load(reader)
        self._losses.chunks_head = reader.manifest.meta.get(CHUNKS_HEAD, False)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.destroy()

    def _begin(self, fragments: Iterable[Fragment], seed: int) -> None:
        for fragment in fragments:
            initialise(self._workload, fragment.name, seed, fragment.views(fragment.partition))


class _WithLoss(nn.Module):
    """The model with its loss: DeepSpeed wraps a module whose output is the loss of a micro-batch."""

    def __init__(self, model: nn.Module, losses: StepLosses, device: Device) -> None:
        super().__init__()
        self.model, self._losses, self._device = model, losses, device

    def forward(self, batch: Batch, parts: int) -> Tensor:
        """fp32 scalar."""
        with self._device.autocast():
            output = self.model(batch, in_chunks=self._losses.in_chunks)
            return self._losses.of(output, batch, parts)


def _build(
    deepspeed: Any,
    workload: Workload,
    layout: Layout,
    device: torch.device,
    config: dict[str, Any],
    in_8_bits: bool,
) -> nn.Module:
    """The model with uninitialised memory; under ZeRO 3 each rank holds its part only.

    There the full model is first allocated in untouched host memory, which costs nothing, and passes through the device
    one parameter at a time.
    """
    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device="cpu" if layout.zero == 3 else device)
    model.train()
    freeze(model, workload)
    if in_8_bits:  # while weights have their shapes
        multiply_in_8_bits(workload.blocks(model))
    if layout.zero == 3:
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    return model

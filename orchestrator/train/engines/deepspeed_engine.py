"""The DeepSpeed engine: ZeRO 1, 2 and 3 and ZeRO-Offload (Rajbhandari et al., 2020; Ren et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.optim.groups import set_lr
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.step_clock import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, StepClock
from orchestrator.train.distillation.teacher import PlacedTop
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.deepspeed_partitions import Partitions, fill_fragments, frozen_fragments
from orchestrator.train.engines.deepspeed_setup import start_deepspeed
from orchestrator.train.engines.engine import Metrics, StepCheck
from orchestrator.train.engines.forward_passes import ForwardPasses
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.losses import arithmetic_in, losses_of
from orchestrator.train.engines.model_buffers import ModelBuffers
from workloads.workload import Batch, Workload


class DeepSpeedEngine:
    """The DeepSpeed engine, see `Engine`. DeepSpeed keeps weights, gradients and optimizer state.

    This project computes losses and counts, and writes commits. Gradients are sums over tokens. The number of predicted
    tokens is known only when the optimizer steps. It is then given to DeepSpeed as its loss scale, by which DeepSpeed
    divides before it clips.
    """

    def __init__(self, config: EngineConfig, workload: Workload, layout: Layout, device: Device) -> None:
        """Build this rank's part of the model and its optimizer; weights stay uninitialised.

        Args:
            config: how to compute a step.
            workload: the model and its objective.
            layout: how the ranks divide the work.
            device: this rank's device.
        """
        self._workload = workload
        self._layout = layout
        self._seed = config.seed
        self.clock = StepClock(device.device)
        self.before_change: Callable[[], None] = lambda: None
        self._mesh = Mesh(layout, self.clock)
        self.losses = losses_of(config, workload, layout, self._mesh, device)
        self._routing = RouterLoad(workload, self._mesh, device.device)
        self._scale = LossScale(config.train.dtype == "fp16")
        parts = start_deepspeed(config, workload, layout, mesh=self._mesh, device=device, losses=self.losses)
        self.model = parts.model
        self._engine = parts.engine
        self._zero = parts.zero
        self._forward = ForwardPasses(self.losses, self._routing, [self.model], self._evaluate)
        self._partitions = Partitions(
            self._zero, layout.zero, self.model, workload, ema=config.ema, quantize=config.quantize
        )
        self._frozen = list(frozen_fragments(self.model, self._mesh.rank))
        self._buffers = ModelBuffers([self.model], workload)

    def train_step(
        self, micro_batches: Sequence[Batch], lr: float, check: StepCheck | None = None
    ) -> Metrics:
        """See `Engine.train_step`. The engine's rules refuse a check earlier.

        Args:
            micro_batches: the rows of this rank.
            lr: the learning rate.
            check: None, because DeepSpeed verifies no steps.
        """
        assert check is None
        self.before_change()
        if self.losses.has_baseline:
            self.take_baseline(self.eval_step(micro_batches))
        self.losses.begin(micro_batches)
        # The factor of the mean is not known before the last forward pass, so DeepSpeed must not unscale yet.
        self.losses.scale, self._zero.loss_scale = self._scale.value, 1.0
        for number, batch in enumerate(micro_batches, start=1):
            self.clock.switch(FORWARD)
            part = self._engine(self.losses.prepare(batch), len(micro_batches))
            self.clock.switch(BACKWARD)
            # DeepSpeed would divide by the accumulation steps; the loss is already divided by `expected`.
            self._engine.backward(part, scale_wrt_gas=False)
            if number < len(micro_batches):
                self._engine.step()  # only counts the micro-batch
        self.clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        load = self._routing.take([self.model])
        loss, extra, count, _, load = self.losses.over_ranks(torch.zeros(()), load)
        routed = self._routing.named(load)
        extra = {**extra, **ratios(routed)}
        if self._scale.enabled:
            extra = {**extra, "loss_scale": self._scale.value, "skipped": 0.0}
        # Turn sums into means: DeepSpeed divided by the ranks, and the loss by `expected` instead of the count.
        self._zero.loss_scale = self._scale.value * count / (self.losses.expected * self._layout.dp)
        set_lr(self._zero.param_groups, lr)
        self.clock.switch(OPTIMIZER)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._zero.overflow or not math.isfinite(norm):
            # every rank has the same norm, so all of them skip the step or all fail
            if self._scale.overflow():
                return Metrics(loss, 0.0, {**extra, "skipped": 1.0})
            return Metrics(loss, math.nan, extra)
        self._scale.succeed()
        self._partitions.updated()
        self._workload.balance(self.model, routed)
        return Metrics(loss, norm, extra)

    @torch.no_grad()
    def poison(self) -> None:
        """See `Engine.poison`. Under ZeRO 3 a rank's partition of a parameter is in `ds_tensor`."""
        self.before_change()
        for parameter in self.model.parameters():
            getattr(parameter, "ds_tensor", parameter).data.fill_(math.nan)

    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        return self._forward.evaluate(micro_batches)

    def take_baseline(self, sums: EvaluationSums) -> None:
        """See `Engine.take_baseline`."""
        self.losses.take_baseline(sums)

    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        return self._forward.next_logits(micro_batches)

    def compute_again(self, micro_batches: Sequence[Batch], exact: bool) -> NoReturn:
        """See `Engine.compute_again`. The engine's rules refuse it earlier."""
        raise NotImplementedError("DeepSpeed does not expose how it sums gradients")

    def test_device(self, seed: int) -> NoReturn:
        """See `Engine.test_device`. Only a check needs it."""
        raise NotImplementedError("DeepSpeed verifies no steps")

    def damage(self, kind: str, seed: int, bit: int | None = None) -> None:
        """See `Engine.damage`. Only a check finds it."""
        raise NotImplementedError("DeepSpeed verifies no steps")

    def hold_reference(self, seed: int) -> None:
        """See `Engine.hold_reference`. The engine's rules refuse it earlier."""
        raise NotImplementedError("DeepSpeed holds no reference")

    def hold_teacher(self, workload: Workload, base: str) -> None:
        """See `Engine.hold_teacher`. The layout's rules refuse it earlier."""
        raise NotImplementedError("DeepSpeed holds no teacher")

    def release_teacher(self) -> None:
        """See `Engine.release_teacher`."""

    def teacher_logits(self, micro_batches: Sequence[Batch], k: int, temperature: float) -> list[PlacedTop]:
        """See `Engine.teacher_logits`. The layout's rules refuse it earlier."""
        raise NotImplementedError("DeepSpeed holds no teacher")

    def token_log_probabilities(
        self, micro_batches: Sequence[Batch], of_reference: bool = False
    ) -> list[Tensor]:
        """See `Engine.token_log_probabilities`. The engine's rules refuse a reference earlier."""
        assert not of_reference
        return self._forward.token_log_probabilities(micro_batches)

    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        return self._forward.answer_log_probabilities(micro_batches)

    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self.before_change()
        self._partitions.swap_average()

    def initialise(self, seed: int) -> None:
        """See `Engine.initialise`."""
        fill_fragments(self._workload, self._frozen, seed)
        self._buffers.initialise(seed)
        self._partitions.initialise(seed)

    def state(self) -> Iterator[TensorPiece]:
        """See `Engine.state`."""
        yield from self._partitions.pieces()
        if self._mesh.rank == 0:
            yield from self._buffers.pieces()
            yield full_piece("optim.step", torch.tensor(self._partitions.steps, dtype=torch.int64))
            yield from self._scale.pieces()

    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        # Before anything is overwritten, so that a commit of another model leaves the engine as it was.
        self._partitions.check(reader)
        fill_fragments(self._workload, self._frozen, self._seed)
        self._partitions.restore(reader)
        self._buffers.restore(reader)
        self._scale.load(reader)
        self.losses.arithmetic = arithmetic_in(reader)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.destroy()

    def _evaluate(self, micro_batches: Sequence[Batch]) -> None:
        self._engine.eval()
        for batch in micro_batches:
            self._engine(self.losses.prepare(batch), len(micro_batches))
        self._engine.train()

"""The torch-native engine: one step under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parallelize import parallelize
from orchestrator.parallel.step_clock import FORWARD, OPTIMIZER, StepClock
from orchestrator.parallel.witness import Record
from orchestrator.train.distillation.teacher import PlacedTop, Teacher
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.engine import Metrics, StepCheck
from orchestrator.train.engines.flaw import Flaw, arithmetic_errors
from orchestrator.train.engines.frozen_weights import FrozenWeights
from orchestrator.train.engines.held_reference import HeldReference
from orchestrator.train.engines.layer_statistics import LayerStatistics
from orchestrator.train.engines.model_buffers import ModelBuffers
from orchestrator.train.engines.torch_passes import TorchPasses
from orchestrator.train.engines.trained_weights import TrainedWeights
from workloads.workload import Batch, Workload


class TorchEngine:
    """An `Engine` in plain torch: run the micro-batches, sum gradients over ranks, clip them and update the weights.

    Attributes:
        clock: the time of the last step by part.
        before_change: see `Engine`.
        mesh: the process groups of the layout.
        parallel: this rank's part of the model.
        passes: forward and backward passes, up to the summed gradients.
        trained: the weights that a step updates, and what changes with them.
        is_pipeline: whether the layout cuts the layers into stages.
        stage_numbers: the numbers of this rank's stages.
    """

    def __init__(
        self, config: EngineConfig, workload: Workload, layout: Layout, device: Device, base: str = ""
    ) -> None:
        """Build this rank's part of the model and its optimizer; weights stay uninitialised.

        Args:
            config: how to compute a step.
            workload: the model and its objective.
            layout: how the ranks divide the work.
            device: this rank's device.
            base: checksum of the base weights if they are read at every start, else empty. With it the ranks of a
                machine share one copy of the frozen weights.
        """
        device = device.at_zero_stage(layout.zero, getattr(workload.config, "shared_layers", False))
        self._train = config.train
        self._workload = workload
        self._layout = layout
        self._device = device
        self._seed = config.seed
        self._shards_teacher = config.distill is not None and config.distill.shard
        self.clock = StepClock(device.device)
        self.before_change: Callable[[], None] = lambda: None
        self.mesh = Mesh(layout, self.clock)
        scheme = config.quantize.scheme if config.quantize else None
        self.parallel = parallelize(workload, layout, self.mesh, device, train=config.train, scheme=scheme)
        self.mesh.connect(device.device)
        self.is_pipeline = layout.pp > 1
        self.stage_numbers = layout.stages_of(self.mesh.coordinate["pp"]) if layout.pp > 1 else [0]
        self._frozen = FrozenWeights(workload, self.parallel, device, base)
        self._buffers = ModelBuffers(self.parallel.stages, workload)
        self.passes = TorchPasses(
            config,
            workload,
            layout,
            mesh=self.mesh,
            device=device,
            parallel=self.parallel,
            clock=self.clock,
        )
        self.trained = TrainedWeights(config, workload, self.parallel, self.mesh, device)
        self._reference = HeldReference(
            config.train.reference == "held",
            workload,
            self.parallel.data,
            self.passes.forward,
            before_change=lambda: self.before_change(),
        )
        self._layers = LayerStatistics(
            config.train.layer_statistics,
            workload,
            self.parallel.stages,
            self.trained.shards,
            self.trained.device,
        )

    def train_step(
        self, micro_batches: Sequence[Batch], lr: float, check: StepCheck | None = None
    ) -> Metrics:
        """See `Engine.train_step`.

        Args:
            micro_batches: the rows of this rank.
            lr: the learning rate.
            check: compares the step with what other ranks computed; None in a step that is not verified.
        """
        micro_batches = self._with_comparisons(micro_batches)
        if check is not None:
            self.mesh.witness.begin(check.exact)
        self.clock.switch(FORWARD)
        self._layers.begin(self.trained.steps + 1)
        self.passes.compute_gradients(micro_batches)
        if check is not None:
            check.gradients(self.mesh.witness.take())
        # Before the norm: gradients of pruned weights are not used, so they must not shrink the others by clipping.
        self.trained.mask_gradients()
        sums = self.passes.sums()
        extra = {**sums.metrics, **self.trained.pruning_metrics}
        scale = self.passes.scale
        if scale.enabled:
            extra = {**extra, "loss_scale": scale.value, "skipped": 0.0}
        if not math.isfinite(sums.square):
            # Every rank has the same sum, so all ranks skip the step or all of them fail.
            if scale.overflow():
                return Metrics(sums.loss, 0.0, {**extra, "skipped": 1.0})
            return Metrics(sums.loss, math.nan, extra)
        # Gradients are still unscaled sums here. The factor enters the norm now, and the gradients together with
        # clipping, so that they are read and written once.
        norm = math.sqrt(sums.square) * sums.factor
        layers = self._layers.take(sums.factor)
        self.clock.switch(OPTIMIZER)
        self.before_change()
        self.trained.update(lr, norm, sums.factor, check)
        for stage in self.parallel.stages:
            # After the update and once a step, from the load of the whole global batch, so that it does not depend on
            # dp or micro-batches.
            self._workload.balance(stage, sums.routed)
        scale.succeed()
        return Metrics(sums.loss, norm, extra, sums.busy_seconds, layers)

    def compute_again(self, micro_batches: Sequence[Batch], exact: bool) -> Record:
        """See `Engine.compute_again`.

        Args:
            micro_batches: the rows.
            exact: whether bits are recorded, see `Witness.begin`.
        """
        with self._buffers.unchanged():
            micro_batches = self._with_comparisons(micro_batches)
            self.mesh.witness.begin(exact, sums_gradients=False)
            self.passes.compute_gradients(micro_batches)
            record = self.mesh.witness.take()
            # Taken and dropped, or the next step's load would count these tokens too.
            self.passes.take_routing()
        return record

    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        return self.passes.evaluate(self._reference.add_to(micro_batches))

    def take_baseline(self, sums: EvaluationSums) -> None:
        """See `Engine.take_baseline`."""
        self.passes.losses.take_baseline(sums)

    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        asking = [self._workload.asking_logits(batch) for batch in micro_batches]
        return self.passes.forward.next_logits(asking)

    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        return self.passes.forward.answer_log_probabilities(micro_batches)

    def token_log_probabilities(
        self, micro_batches: Sequence[Batch], of_reference: bool = False
    ) -> list[Tensor]:
        """See `Engine.token_log_probabilities`.

        Args:
            micro_batches: rows with generated answers.
            of_reference: whether to use the reference model.
        """
        if not of_reference:
            return self.passes.forward.token_log_probabilities(micro_batches)
        with self._reference.in_place_of_weights():
            return self.passes.forward.token_log_probabilities(micro_batches)

    def hold_reference(self, seed: int) -> None:
        """See `Engine.hold_reference`."""
        self.initialise(seed)
        self._reference.hold()

    def hold_teacher(self, workload: Workload, base: str) -> None:
        """See `Engine.hold_teacher`.

        Args:
            workload: the teacher.
            base: checksum of its weights.
        """
        self.passes.teacher = Teacher(
            workload,
            self._layout,
            mesh=self.mesh,
            device=self._device,
            train=self._train,
            base=base,
            shard=self._shards_teacher,
        )

    def release_teacher(self) -> None:
        """See `Engine.release_teacher`."""
        if self.passes.teacher is not None:
            self.passes.teacher.close()
            self.passes.teacher = None

    @torch.no_grad()
    def teacher_logits(self, micro_batches: Sequence[Batch], k: int, temperature: float) -> list[PlacedTop]:
        """See `Engine.teacher_logits`.

        Args:
            micro_batches: the micro-batches of this rank.
            k: number of logits per token.
            temperature: divides the logits before the log-sum over the vocabulary.
        """
        assert self.passes.teacher is not None
        return self.passes.teacher.top(micro_batches, k, temperature)

    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self.before_change()
        self.trained.swap_average()

    def initialise(self, seed: int) -> None:
        """See `Engine.initialise`."""
        self._frozen.fill(seed)
        self._buffers.initialise(seed)
        self.trained.initialise(seed)

    def state(self) -> Iterator[TensorPiece]:
        """See `Engine.state`."""
        yield from self.trained.pieces()
        if self.mesh.data.index == self.mesh.tp.index == 0:
            yield from self._buffers.pieces()
        if self.mesh.rank == 0:
            yield self.trained.step_piece()
            yield from self.passes.scale.pieces()

    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        # Before anything is overwritten, so that a commit of another model leaves the engine as it was.
        self.trained.check(reader)
        self._frozen.fill(self._seed)
        self._buffers.restore(reader)
        self.trained.restore(reader, self._seed)
        self.passes.load(reader)

    @torch.no_grad()
    def poison(self) -> None:
        """See `Engine.poison`."""
        self.before_change()
        for stage in self.parallel.stages:
            for parameter in stage.parameters():
                parameter.copy_(torch.full_like(parameter, math.nan))

    def test_device(self, seed: int) -> list[str]:
        """See `Engine.test_device`."""
        return arithmetic_errors(self._device.device, seed, self.trained.flaw)

    def damage(self, kind: str, seed: int, bit: int | None = None) -> None:
        """See `Engine.damage`.

        Args:
            kind: what is wrong: product, gradient or update.
            seed: chooses the layer, the number and the bit.
            bit: the bit; None to let the seed choose.
        """
        self.trained.flaw = Flaw(kind, seed, bit)
        self.trained.flaw.install(self.parallel.stages)

    def resident_tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that stay between two steps, in three groups: weights, gradients, optimizer."""
        shards = [shard.parameter for shard in self.trained.shards]
        teacher = self.passes.teacher.resident_tensors() if self.passes.teacher is not None else []
        return {
            "weights": [*self.parallel.weights(), *shards, *self._reference.tensors, *teacher],
            "gradients": [*self.parallel.gradients(), *(p.grad for p in shards if p.grad is not None)],
            "optimizer": self.trained.optimizer_tensors(),
        }

    def close(self) -> None:
        """See `Engine.close`.

        Modules and their hooks refer to each other, so only the garbage collector would free their memory, perhaps
        after the next engine has allocated its own. Storages are therefore emptied here.
        """
        for tensor in (
            storage_tensor for tensors in self.resident_tensors().values() for storage_tensor in tensors
        ):
            storage = tensor.untyped_storage()
            if storage.resizable():  # memory mapped from a file is not
                storage.resize_(0)
        self.trained.optimizer.state.clear()
        self._frozen.close()
        if self.passes.teacher is not None:
            self.passes.teacher.close()

    def _with_comparisons(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches of a step with what their losses are compared with, and take the baseline.

        The baseline is a mean over the global batch, which the loss of the first micro-batch already needs.
        """
        micro_batches = self._reference.add_to(micro_batches)
        if self.passes.losses.has_baseline:
            self.take_baseline(self.eval_step(micro_batches))
        return micro_batches

"""The torch-native engine: one step under any layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.records import REWARDED
from orchestrator.optim.blocks import block_counts, names_in_8_bits
from orchestrator.optim.build import OptimizerContext, build_optimizer, slots_of
from orchestrator.optim.groups import rates_of, set_lr
from orchestrator.optim.kinds import kind_of
from orchestrator.parallel import burn_in
from orchestrator.parallel.block_maxima import BlockMaxima
from orchestrator.parallel.device import Device
from orchestrator.parallel.fsdp import local_of
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.norms import GlobalNorms, clip_factor, squared_norm
from orchestrator.parallel.parallelize import parallelize
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.runner import runner_of
from orchestrator.parallel.step_clock import COMMUNICATION, FORWARD, OPTIMIZER, StepClock, Stopwatch
from orchestrator.parallel.witness import Record
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.names import pruned_names
from orchestrator.prune.pruner import Pruner
from orchestrator.train.committed_state import CHUNKS_HEAD
from orchestrator.train.distillation.teacher import PlacedTop, Teacher
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.engine import Metrics, StepCheck
from orchestrator.train.engines.flaw import Flaw
from orchestrator.train.engines.frozen_weights import FrozenWeights, fill
from orchestrator.train.engines.layer_statistics import LayerStatistics
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.losses import losses_of
from orchestrator.train.engines.moving_average import MovingAverage
from orchestrator.train.engines.rounding import Rounding
from orchestrator.train.engines.state import committed_shapes, pieces, restore, shards_to_save
from orchestrator.train.engines.update_again import UpdateAgain
from workloads.objectives.preferences import REFERENCE
from workloads.objectives.rewarded import REFERENCE_TOKENS
from workloads.workload import Batch, Workload


class TorchEngine:
    """An `Engine` in plain torch: run the micro-batches, sum gradients over ranks, clip them and update the weights."""

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
        # Under ZeRO 3 a kept cast would outlive the gathered weight that it was made of, and hold a copy of the whole
        # model. Only layers that share weights use it again.
        keeps_casts = layout.zero < 3 or getattr(workload.config, "shared_layers", False)
        device = dataclasses.replace(device, keeps_casts=keeps_casts, keeps_weights=layout.zero < 2)
        self._train = config.train
        self._workload = workload
        self._layout = layout
        self._device = device
        self._seed = config.seed
        # With plain data parallelism a rank first waits for others in the sum of gradients. The time before that sum
        # is then the time that this rank was busy.
        self._is_alone_until_reduction = layout.world == layout.dp and layout.zero <= 1 and layout.ep == 1
        self.clock = StepClock(device.device)
        self._mesh = Mesh(layout, self.clock)
        scheme = config.quantize.scheme if config.quantize else None
        self.parallel = parallelize(workload, layout, self._mesh, device, train=config.train, scheme=scheme)
        self._rounding = Rounding(self.parallel.stages, config.quantize)
        self._mesh.connect(device.device)
        self._data = self.parallel.data
        self._frozen = FrozenWeights(workload, self.parallel, device, base)
        self._teacher: Teacher | None = None
        self._stages = self.parallel.stages
        self.is_pipeline = layout.pp > 1
        self.stage_numbers = layout.stages_of(self._mesh.coordinate["pp"]) if layout.pp > 1 else [0]
        self._losses = losses_of(config, workload, layout, self._mesh, device)
        self._routing = RouterLoad(workload, self._mesh, device.device)
        self._runner = runner_of(
            stages=self._stages,
            workload=workload,
            layout=layout,
            mesh=self._mesh,
            data=self._data,
            losses=self._losses,
            device=device,
            clock=self.clock,
        )
        self._scale = LossScale(config.train.dtype == "fp16")
        self._full = FullMatrices(self._matrices(), self._data.shards, self._mesh, device.device)
        kind = kind_of(str(config.train.optimizer.name))
        self._in_8_bits = names_in_8_bits(workload) if kind.in_8_bits else frozenset()
        special = self._in_8_bits if kind.in_8_bits else self._full.names
        self._slots = partial(slots_of, config.train.optimizer, special=special)
        self._optimizer = self._make_optimizer()
        self._steps = 0
        self._flaw: Flaw | None = None
        # A copy of the initial weights, sharded like the parameters. Present only when the job keeps a reference model.
        shards = self._data.shards if config.train.reference == "held" else []
        self._reference = [torch.empty_like(shard.parameter) for shard in shards]
        self._average = MovingAverage(config.ema, [s.parameter for s in self._data.shards])
        self._pruner = self._make_pruner(config.prune)
        self._layers = LayerStatistics(
            config.train.layer_statistics, workload, self._stages, self._data.shards, self._full.device
        )
        self._buffers = {
            name: tensor
            for stage in self._stages
            for name, tensor in stage.named_buffers()
            if name in workload.shapes
        }

    def train_step(
        self, micro_batches: Sequence[Batch], lr: float, check: StepCheck | None = None
    ) -> Metrics:
        """See `Engine.train_step`."""
        micro_batches = self._with_references(micro_batches)
        if check is not None:
            self._mesh.witness.begin(check.exact)
        self.clock.switch(FORWARD)
        self._layers.begin(self._steps + 1)
        watch = self._gradients(micro_batches)
        if check is not None:
            check.gradients(self._mesh.witness.take())
        # Before the norm: gradients of pruned weights are not used, so they must not shrink the others by clipping.
        self._pruner.mask_gradients()
        # The squared norm is computed on shards of gradients and travels with the metrics: one all-gather for both.
        loss, extra, count, square = self._losses.over_ranks(squared_norm(self._data.shards))
        busy = watch.seconds() if self._is_alone_until_reduction else 0.0
        routed = self._routing.take(self._stages)
        extra = {**extra, **ratios(routed), **self._pruner.metrics}
        # The backward pass differentiated (sum / expected) x scale; this makes it the gradient of sum / count.
        # One factor for everything, folded with clipping into a single pass over the gradients below.
        factor = self._losses.expected / count / self._scale.value
        if self._scale.enabled:
            extra = {**extra, "loss_scale": self._scale.value, "skipped": 0.0}
        if not math.isfinite(square):
            # Every rank has the same sum, so all ranks skip the step or all of them fail.
            if self._scale.overflow():
                return Metrics(loss, 0.0, {**extra, "skipped": 1.0})
            return Metrics(loss, math.nan, extra)
        norm = math.sqrt(square) * factor
        layers = self._layers.take(factor)
        self.clock.switch(OPTIMIZER)
        self._update(lr, factor * clip_factor(norm, self._train.optimizer.clip), routed, check)
        self._scale.succeed()
        return Metrics(loss, norm, extra, busy, layers)

    def compute_again(self, micro_batches: Sequence[Batch], exact: bool) -> Record:
        """See `Engine.compute_again`."""
        # Running statistics of the user's layers change in a forward pass.
        kept = {name: buffer.clone() for name, buffer in self._buffers.items()}
        micro_batches = self._with_references(micro_batches)
        self._mesh.witness.begin(exact)
        self._gradients(micro_batches)
        record = self._mesh.witness.take()
        self._routing.take(self._stages)
        for name, buffer in kept.items():
            self._buffers[name].copy_(buffer)
        return record

    def _gradients(self, micro_batches: Sequence[Batch]) -> Stopwatch:
        """Compute the gradients of micro-batches, summed over the ranks; return the time before that sum."""
        self._data.begin()
        self._losses.begin(micro_batches)
        self._losses.scale = self._scale.value
        watch = Stopwatch(self._device.device)
        self._runner.train(self._taught(micro_batches))
        watch.stop()
        self.clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        # Before the sum over replicas, which then adds complete gradients.
        self.parallel.shared.sum()
        self._data.finish()
        return watch

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        micro_batches = self._with_reference(micro_batches)
        self._losses.begin_evaluation()
        self._evaluate(self._taught(micro_batches))
        return self._losses.evaluated(self._routing.take(self._stages))

    def take_baseline(self, sums: EvaluationSums) -> None:
        """See `Engine.take_baseline`."""
        self._losses.take_baseline(sums)

    @torch.no_grad()
    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        self._losses.begin_prediction()
        self._evaluate([self._workload.asking_logits(batch) for batch in micro_batches])
        self._routing.take(self._stages)
        return self._losses.predicted()

    @torch.no_grad()
    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        return self._losses.answer_log_probabilities()

    @torch.no_grad()
    def token_log_probabilities(
        self, micro_batches: Sequence[Batch], of_reference: bool = False
    ) -> list[Tensor]:
        """See `Engine.token_log_probabilities`."""
        if of_reference:
            self._swap_reference()
        self._losses.begin_tokens()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        found = self._losses.token_log_probabilities()
        if of_reference:
            self._swap_reference()
        # Only a pipeline's last stage computes and reads them; see `_with_reference`.
        return found or [torch.zeros(batch["labels"].shape) for batch in micro_batches]

    @torch.no_grad()
    def hold_reference(self, seed: int) -> None:
        """See `Engine.hold_reference`."""
        self.initialise(seed)
        for held, shard in zip(self._reference, self._data.shards, strict=False):
            held.copy_(shard.parameter)

    def hold_teacher(self, workload: Workload, base: str) -> None:
        """See `Engine.hold_teacher`."""
        self._teacher = Teacher(
            workload, self._layout, mesh=self._mesh, device=self._device, train=self._train, base=base
        )

    def release_teacher(self) -> None:
        """See `Engine.release_teacher`."""
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None

    @torch.no_grad()
    def teacher_logits(self, micro_batches: Sequence[Batch], k: int, temperature: float) -> list[PlacedTop]:
        """See `Engine.teacher_logits`."""
        assert self._teacher is not None
        return self._teacher.top(micro_batches, k, temperature)

    def _taught(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches with the teacher's outputs for them, if this rank has a teacher."""
        return micro_batches if self._teacher is None else self._teacher.taught(micro_batches)

    def _with_references(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches of a step with what their losses are compared with, and take the baseline.

        The baseline is a mean over the global batch, which the loss of the first micro-batch already needs.
        """
        micro_batches = self._with_reference(micro_batches)
        if self._losses.has_baseline:
            self.take_baseline(self.eval_step(micro_batches))
        return micro_batches

    @torch.no_grad()
    def _with_reference(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches with their answers' log-probabilities under the reference, if this rank holds it."""
        if not self._reference or micro_batches[0].keys() & {REFERENCE, REFERENCE_TOKENS}:
            return micro_batches
        if self._workload.objective.name in REWARDED:
            values = self.token_log_probabilities(micro_batches, of_reference=True)
            return [
                {**batch, REFERENCE_TOKENS: each} for batch, each in zip(micro_batches, values, strict=True)
            ]
        self._swap_reference()
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        answers = self._losses.answer_log_probabilities(on_every_rank=True)
        self._swap_reference()
        # Only a pipeline's last stage computes and reads them. The other stages add zeros of the same shape, so that
        # the key is there and this pass does not run a second time for the same micro-batches.
        answers = answers or [torch.zeros(len(batch["tokens"]), 2) for batch in micro_batches]
        return [{**batch, REFERENCE: each} for batch, each in zip(micro_batches, answers, strict=True)]

    def _swap_reference(self) -> None:
        """Exchange the weights and the reference; a second call restores the same bits."""
        for held, shard in zip(self._reference, self._data.shards, strict=True):
            now = shard.parameter.clone()
            shard.parameter.copy_(held)
            held.copy_(now)
        # Ranks hold slices of the exchanged weights; the model computes with the gathered ones.
        self._data.publish()

    def _evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Run the forward passes in evaluation mode, where dropout is off."""
        for stage in self._stages:
            stage.eval()
        self._runner.evaluate(micro_batches)
        for stage in self._stages:
            stage.train()

    @torch.no_grad()
    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self._average.swap()
        self._data.publish()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Engine.initialise`."""
        # Each element depends on (seed, name, place) alone, so every layout begins with the same weights without a
        # broadcast.
        fill(self._workload, self._data.shards, seed)
        self._frozen.fill(seed)
        for name, buffer in self._buffers.items():
            buffer.copy_(self._workload.initial(name, seed))
        self._data.publish()
        self._optimizer = self._make_optimizer()
        self._steps = 0
        self._rounding.at(0)
        self._average.begin()
        self._pruner.begin()

    def state(self) -> Iterator[TensorPiece]:
        """See `Engine.state`."""
        yield from pieces(self._data.shards, self._optimizer, self._slots, self._average.of)
        for shard in shards_to_save(self._data.shards):
            yield from self._pruner.pieces(shard)
        if self._mesh.data.index == self._mesh.tp.index == 0:
            yield from (full_piece(f"model.{name}", buffer) for name, buffer in self._buffers.items())
        if self._mesh.rank == 0:
            yield full_piece("optim.step", torch.tensor(self._steps, dtype=torch.int64))
            yield from self._scale.pieces()

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        thawed = self._workload.thawed_after
        step = reader.manifest.step
        # Parameters that begin to train at this step: the checkpoint has no optimizer state of them yet.
        now = [name for name, at in thawed.items() if at == step]
        # Before anything is overwritten, so that a commit of another model leaves the engine as it was.
        reader.manifest.check_shapes(committed_shapes(self._workload, now))
        self._frozen.fill(self._seed)
        fill(self._workload, [shard for shard in self._data.shards if shard.name in now], self._seed)
        restore(
            self._data.shards,
            self._optimizer,
            slots=self._slots,
            averages=self._average.of,
            reader=reader,
            thawed=thawed,
        )
        self._pruner.restore(reader)
        self._steps = int(reader.read("optim.step"))
        self._rounding.at(self._steps)
        self._average.go_on(self._steps)
        for name, buffer in self._buffers.items():
            buffer.copy_(reader.read(f"model.{name}"))
        self._scale.load(reader)
        self._losses.chunks_head = reader.manifest.meta.get(CHUNKS_HEAD, False)
        self._data.publish()

    @torch.no_grad()
    def poison(self) -> None:
        """See `Engine.poison`."""
        for stage in self._stages:
            for parameter in stage.parameters():
                parameter.copy_(torch.full_like(parameter, math.nan))

    def test_device(self, seed: int) -> list[str]:
        """See `Engine.test_device`."""
        flaw = self._flaw
        bend = {flaw.kind: flaw.bend} if flaw is not None else {}
        product = bend.get("product") or bend.get("gradient") or burn_in.as_it_is
        return [
            *burn_in.products(self._device.device, seed, product),
            *burn_in.updates(self._device.device, seed, bend.get("update", burn_in.as_it_is)),
        ]

    def damage(self, kind: str, seed: int, bit: int | None = None) -> None:
        """See `Engine.damage`."""
        self._flaw = Flaw(kind, seed, bit)
        self._flaw.install(self._stages)

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that stay between two steps, in three groups: weights, gradients, optimizer."""
        weights = [local_of(p) for stage in self._stages for p in stage.parameters()]
        weights += [shard.parameter for shard in self._data.shards]
        weights += self._reference
        weights += self._teacher.held() if self._teacher is not None else []
        weights += [each for _, weight in self.parallel.quantised.values() for each in weight.buffers()]
        gradients = [p.grad for stage in self._stages for p in stage.parameters()]
        gradients += [shard.parameter.grad for shard in self._data.shards]
        slots = [each for state in self._optimizer.state.values() for each in state.values()]
        averages = [*self._average.of.values(), *self._pruner.tensors]
        return {
            "weights": weights,
            "gradients": [local_of(each) for each in gradients if each is not None],
            "optimizer": [each for each in [*slots, *averages] if isinstance(each, Tensor)],
        }

    def close(self) -> None:
        """See `Engine.close`.

        Modules and their hooks refer to each other, so only the garbage collector would free their memory, perhaps
        after the next engine has allocated its own. Storages are therefore emptied here.
        """
        for tensor in (each for tensors in self.held().values() for each in tensors):
            storage = tensor.untyped_storage()
            if storage.resizable():  # memory mapped from a file is not
                storage.resize_(0)
        self._optimizer.state.clear()
        self._frozen.close()
        if self._teacher is not None:
            self._teacher.close()

    @torch.no_grad()
    def _update(self, lr: float, scale: float, routed: Mapping[str, Tensor], check: StepCheck | None) -> None:
        """Scale the gradients, step the optimizer and balance the routers by their load in this step."""
        gradients = [s.parameter.grad for s in self._data.shards if s.parameter.grad is not None]
        if scale != 1.0 and gradients:
            # In place and in one kernel: a copy of all gradients would raise the peak of memory exactly at the update.
            torch._foreach_mul_(gradients, scale)
        set_lr(self._optimizer.param_groups, lr)
        if check is None:
            self._optimizer.step()
            if self._flaw is not None:
                self._flaw.bend_updates([shard.parameter for shard in self._data.shards])
        else:
            self._update_again().step(self._optimizer, lr, check)
        self._steps += 1
        self._pruner.update(self._steps, scale, self._optimizer, self._average.of)
        self._rounding.at(self._steps)
        self._average.update()
        self._data.publish()
        for stage in self._stages:
            # After the update and once a step, from the load of the whole global batch, so that it does not depend on
            # dp or micro-batches.
            self._workload.balance(stage, routed)

    def _update_again(self) -> UpdateAgain:
        return UpdateAgain(
            self._data.shards,
            self.parallel.cuts,
            spec=self._train.optimizer,
            slots=self._slots,
            build=self._make_optimizer,
            device=self._device.device,
            flaw=self._flaw,
        )

    def _make_optimizer(self, shards: Sequence[ParameterShard] | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of these shards, by default of all that this rank updates."""
        shards = self._data.shards if shards is None else shards
        stacks = self._workload.stacks
        # Matrices per tensor: a stack of experts [experts, rows, columns] has a norm for each of its matrices.
        experts = {n: shape[0] if n in stacks else 1 for n, shape in self._workload.shapes.items()}
        full_precision = self._device.compute is torch.float32
        context = OptimizerContext(
            spec=self._train.optimizer,
            shards=shards,
            norms=GlobalNorms(shards, experts, self._full.device),
            rate=rates_of(self._train.optimizer, self._workload),
            full=self._full,
            matmul_dtype=torch.float32 if full_precision else torch.bfloat16,
            in_8_bits=self._in_8_bits,
            maxima=BlockMaxima(block_counts(self._workload, self._in_8_bits), self._mesh),
        )
        return build_optimizer(context)

    def _make_pruner(self, prune: PruneSpec | None) -> Pruner:
        names = pruned_names(prune, self._workload)
        cuts = {name: cut for name, cut in self.parallel.cuts.items() if name in names}
        full = FullMatrices(cuts, self._data.shards, self._mesh, self._full.device)
        return Pruner(prune, names, self._data.shards, full)

    def _matrices(self) -> dict[str, Cut]:
        """Return the cuts of the matrices that Muon updates: trained matrices of layers, stacks of experts included."""
        top = max(map(self._workload.depth, self._workload.shapes))
        return {
            name: cut
            for name, cut in self.parallel.cuts.items()
            if name not in self._workload.frozen
            and cut.matrix
            and (len(cut.shape) == 2 or cut.stack)
            and 0 < self._workload.depth(name) < top
        }

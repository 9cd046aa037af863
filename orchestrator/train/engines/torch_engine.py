"""The torch-native engine: one step under any layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.spec import JobSpec
from orchestrator.optim.build import OptimizerContext, build_optimizer, slots_of
from orchestrator.optim.groups import rates_of, set_lr
from orchestrator.parallel.device import Device
from orchestrator.parallel.fsdp import local_of
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums, StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.norms import GlobalNorms, squared_norm
from orchestrator.parallel.parallelize import parallelize
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.runner import runner_of
from orchestrator.parallel.shared_base import SharedBase, share
from orchestrator.parallel.step_clock import COMMUNICATION, FORWARD, OPTIMIZER, StepClock, Stopwatch
from orchestrator.train.engines.engine import Metrics
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.moving_average import MovingAverage
from orchestrator.train.engines.state import committed_shapes, initialise, pieces, restore
from orchestrator.train.progress import CHUNKS_HEAD
from workloads.objectives.preferences import REFERENCE
from workloads.workload import Batch, Workload

T = TypeVar("T")
DRAWING = 8
"""Most tensors whose initial values are drawn at a time, each by one thread, and whole."""


class TorchEngine:
    """See `Engine`. Runs the micro-batches, sums gradients, clips them and updates the weights."""

    def __init__(
        self, spec: JobSpec, workload: Workload, layout: Layout, device: Device, base: str = ""
    ) -> None:
        """`base` is a checksum of the weights that the run began with, if they are read at every start: what of them
        is not trained is then held once on a machine."""
        keeps_casts = layout.zero < 3 or getattr(workload.config, "shared_layers", False)
        device = dataclasses.replace(device, keeps_casts=keeps_casts, keeps_weights=layout.zero < 2)
        self._spec, self._workload, self._layout, self._device = spec.train, workload, layout, device
        self._seed, self._base = spec.seed, base
        self._shared: SharedBase | None = None
        self._is_alone_until_reduction = layout.world == layout.dp and layout.zero <= 1 and layout.ep == 1
        self.clock = StepClock(device.device)
        self._mesh = Mesh(layout, self.clock)
        self.parallel = parallelize(workload, layout, self._mesh, device, spec.train)
        self._mesh.connect(device.device)
        self._data, self._stages = self.parallel.data, self.parallel.stages
        self.is_pipeline = layout.pp > 1
        self.stage_numbers = layout.stages_of(self._mesh.coordinate["pp"]) if layout.pp > 1 else [0]
        self._losses = StepLosses(spec, workload, layout, self._mesh, device)
        self._routing = RouterLoad(workload, self._mesh, device.device)
        self._runner = runner_of(
            self._stages, workload, layout, self._mesh, self._data, self._losses, device, self.clock
        )
        self._scale = LossScale(spec.train.dtype == "fp16")
        self._full = FullMatrices(self._matrices(), self._data.shards, self._mesh, device.device)
        self._slots = partial(slots_of, spec.train.optimizer, matrices=self._full.names)
        self._optimizer, self._steps = self._make_optimizer(), 0
        # Of the weights that the run began with, where the job holds them: divided as they are, once for a layout.
        shards = self._data.shards if spec.train.reference == "held" else []
        self._reference = [torch.empty_like(shard.parameter) for shard in shards]
        self._average = MovingAverage(spec.checkpoint.ema, [s.parameter for s in self._data.shards])
        self._buffers = {
            name: tensor
            for stage in self._stages
            for name, tensor in stage.named_buffers()
            if name in workload.shapes
        }

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> Metrics:
        """See `Engine.train_step`."""
        micro_batches = self._with_reference(micro_batches)
        if self._losses.has_baseline:
            self.take_baseline(self.eval_step(micro_batches))
        self.clock.switch(FORWARD)
        self._data.begin()
        self._losses.begin(micro_batches)
        self._losses.scale = self._scale.value
        watch = Stopwatch(self._device.device)
        self._runner.train(micro_batches)
        watch.stop()
        self.clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        self.parallel.shared.sum()
        self._data.finish()
        loss, extra, count, square = self._losses.over_ranks(squared_norm(self._data.shards))
        busy = watch.seconds() if self._is_alone_until_reduction else 0.0
        routed = self._routing.take(self._stages)
        extra = {**extra, **ratios(routed)}
        factor = self._losses.expected / count / self._scale.value
        if self._scale.enabled:
            extra = {**extra, "loss_scale": self._scale.value, "skipped": 0.0}
        if not math.isfinite(square):
            # every rank has the same sum, so that all skip the step or all fail
            return (
                Metrics(loss, 0.0, {**extra, "skipped": 1.0})
                if self._scale.overflow()
                else Metrics(loss, math.nan, extra)
            )
        norm = math.sqrt(square) * factor
        self.clock.switch(OPTIMIZER)
        self._update(lr, factor * self._clip(norm), routed)
        self._scale.succeed()
        return Metrics(loss, norm, extra, busy)

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        micro_batches = self._with_reference(micro_batches)
        self._losses.begin_evaluation()
        self._evaluate(micro_batches)
        return self._losses.evaluated(self._routing.take(self._stages))

    def take_baseline(self, sums: EvaluationSums) -> None:
        """See `Engine.take_baseline`."""
        self._losses.take_baseline(sums)

    @torch.no_grad()
    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        self._losses.begin_prediction()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        return self._losses.predicted()

    @torch.no_grad()
    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        return self._losses.said()

    @torch.no_grad()
    def hold_reference(self, seed: int) -> None:
        """See `Engine.hold_reference`."""
        self.initialise(seed)
        for held, shard in zip(self._reference, self._data.shards, strict=False):
            held.copy_(shard.parameter)

    @torch.no_grad()
    def _with_reference(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches with the log-probabilities of their answers under the reference, if it is held."""
        if not self._reference or REFERENCE in micro_batches[0]:
            return micro_batches
        self._swap_reference()
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take(self._stages)
        said = self._losses.said(here=True)
        self._swap_reference()
        # Stages before the last have none, and read none; but they know that it was computed.
        said = said or [torch.zeros(len(batch["tokens"]), 2) for batch in micro_batches]
        return [{**batch, REFERENCE: each} for batch, each in zip(micro_batches, said, strict=True)]

    def _swap_reference(self) -> None:
        for held, shard in zip(self._reference, self._data.shards, strict=True):
            now = shard.parameter.clone()
            shard.parameter.copy_(held)
            held.copy_(now)
        self._data.publish()

    def _evaluate(self, micro_batches: Sequence[Batch]) -> None:
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
        self._begin(self._data.shards, seed)
        self._begin_frozen(seed)
        for name, buffer in self._buffers.items():
            buffer.copy_(self._workload.initial(name, seed))
        self._data.publish()
        self._optimizer, self._steps = self._make_optimizer(), 0
        self._average.begin()

    def state(self) -> Iterator[TensorPiece]:
        """See `Engine.state`."""
        yield from pieces(self._data.shards, self._optimizer, self._slots, self._average.of)
        if self._mesh.data.index == self._mesh.tp.index == 0:
            yield from (full_piece(f"model.{name}", buffer) for name, buffer in self._buffers.items())
        if self._mesh.rank == 0:
            yield full_piece("optim.step", torch.tensor(self._steps, dtype=torch.int64))
            yield from self._scale.pieces()

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        thawed, step = self._workload.thawed_after, reader.manifest.step
        now = [name for name, at in thawed.items() if at == step]
        reader.manifest.check_shapes(committed_shapes(self._workload, now))
        self._begin_frozen(self._seed)
        self._begin([shard for shard in self._data.shards if shard.name in now], self._seed)
        restore(self._data.shards, self._optimizer, self._slots, self._average.of, reader, thawed)
        self._steps = int(reader.read("optim.step"))
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

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that stay between two steps, by what they are for: weights, gradients, optimizer."""
        weights = [local_of(p) for stage in self._stages for p in stage.parameters()]
        small = [each for _, weight in self.parallel.quantised.values() for each in weight.buffers()]
        found = [p.grad for stage in self._stages for p in stage.parameters()]
        found += [shard.parameter.grad for shard in self._data.shards]
        slots = [each for state in self._optimizer.state.values() for each in state.values()]
        averages = list(self._average.of.values())
        return {
            "weights": weights + [shard.parameter for shard in self._data.shards] + self._reference + small,
            "gradients": [local_of(each) for each in found if each is not None],
            "optimizer": [each for each in [*slots, *averages] if isinstance(each, Tensor)],
        }

    def close(self) -> None:
        """See `Engine.close`. Modules and what hangs on them refer to each other: memory that waited for the garbage
        collector would be there twice when another engine follows."""
        for tensor in (each for tensors in self.held().values() for each in tensors):
            storage = tensor.untyped_storage()
            if storage.resizable():  # not what is mapped from a file
                storage.resize_(0)
        self._optimizer.state.clear()
        if self._shared:
            self._shared.close()

    @torch.no_grad()
    def _update(self, lr: float, scale: float, routed: Mapping[str, Tensor]) -> None:
        gradients = [s.parameter.grad for s in self._data.shards if s.parameter.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        set_lr(self._optimizer.param_groups, lr)
        self._optimizer.step()
        self._steps += 1
        self._average.update()
        self._data.publish()
        for stage in self._stages:
            self._workload.balance(stage, routed)

    def _clip(self, norm: float) -> float:
        most = self._spec.optimizer.clip
        return 1.0 if most is None else min(1.0, most / (norm + 1e-6))

    def _make_optimizer(self) -> torch.optim.Optimizer:
        shards = self._data.shards
        stacks = self._workload.stacks
        experts = {n: shape[0] if n in stacks else 1 for n, shape in self._workload.shapes.items()}
        full_precision = self._device.compute is torch.float32
        context = OptimizerContext(
            spec=self._spec.optimizer,
            shards=shards,
            norms=GlobalNorms(shards, experts, self._full.device),
            rate=rates_of(self._spec.optimizer, self._workload),
            full=self._full,
            matmul_dtype=torch.float32 if full_precision else torch.bfloat16,
        )
        return build_optimizer(context)

    def _matrices(self) -> dict[str, Cut]:
        """Those of the layers that are trained, which Muon updates: also every expert of a stack."""
        top = max(map(self._workload.depth, self._workload.shapes))
        return {
            name: cut
            for name, cut in self.parallel.cuts.items()
            if name not in self._workload.frozen
            and cut.matrix
            and (len(cut.shape) == 2 or cut.stack)
            and 0 < self._workload.depth(name) < top
        }

    def _begin_frozen(self, seed: int) -> None:
        """Read what is not trained, or share it with who has it on this machine."""
        self._begin_quantised(seed)
        frozen = self.parallel.frozen
        parameters = {name: p for stage in self._stages for name, p in stage.named_parameters()}
        mine = [parameters[shard.name] for shard in frozen]
        if self._shared or not (self._base and mine) or self._device.device.type != "cpu":
            return None if self._shared else self._begin(frozen, seed)
        if any(isinstance(each, DTensor) for each in mine):  # under ZeRO 3 each rank has its own part
            return self._begin(frozen, seed)

        def fill(tensors: Sequence[Tensor]) -> None:
            for shard, tensor in zip(frozen, tensors, strict=True):
                initialise(self._workload, shard.name, seed, shard.views(tensor))

        key = f"{self._base} {seed} {[(shard.name, shard.boxes) for shard in frozen]}"
        self._shared = share(key, [each.shape for each in mine], fill)
        if self._shared is None:
            return self._begin(frozen, seed)
        for shard, parameter, tensor in zip(frozen, mine, self._shared.tensors, strict=True):
            parameter.data = shard.parameter.data = tensor
        return None

    def _begin_quantised(self, seed: int) -> None:
        def fill(name: str) -> None:
            cut, weight = self.parallel.quantised[name]
            stored = self._workload.stored(name, seed)
            assert stored is not None
            with torch.no_grad():
                weight.fill(stored, *cut.slices())

        _of_each(fill, self.parallel.quantised)

    def _begin(self, shards: Iterable[ParameterShard], seed: int) -> None:
        def draw(shard: ParameterShard) -> None:
            with torch.no_grad():  # which each thread has of its own
                initialise(self._workload, shard.name, seed, shard.views(shard.parameter))

        _of_each(draw, shards)


def _of_each(do: Callable[[T], None], tensors: Iterable[T]) -> None:
    """Whatever the order: a tensor's values do not depend on another's."""
    threads = min(torch.get_num_threads(), DRAWING)
    if threads == 1:
        for each in tensors:
            do(each)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(do, tensors))

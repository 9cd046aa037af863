"""The DeepSpeed engine: ZeRO 1, 2 and 3 and ZeRO-Offload (Rajbhandari et al., 2020; Ren et al., 2021)."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.errors import InputError
from orchestrator.models.averaged import AVERAGE
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, groups_of, rates_of, set_lr
from orchestrator.parallel.device import Device
from orchestrator.parallel.divided_model import freeze
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums, StepLosses
from orchestrator.parallel.low_precision import fake_quantise, multiply_in_8_bits
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parameter_shard import Box, boxes_of
from orchestrator.parallel.partition import Cut, cut_of
from orchestrator.parallel.recompute import recompute
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.step_clock import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, StepClock
from orchestrator.train.committed_state import CHUNKS_HEAD
from orchestrator.train.config import TrainSpec
from orchestrator.train.distillation.teacher import PlacedTop
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.engine import Metrics, StepCheck
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.losses import losses_of
from orchestrator.train.engines.moving_average import MovingAverage
from orchestrator.train.engines.rounding import Rounding
from orchestrator.train.engines.state import committed_shapes, initialise
from workloads.model.scheme import Scheme
from workloads.workload import Batch, Workload

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's optimizer state of one parameter."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter in a flat partition of this rank.

    Attributes:
        name, shape: of the full parameter.
        boxes: the part in coordinates of the parameter.
        partition: the flat partition.
        start, size: the part's range in the partition.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    partition: Tensor
    start: int
    size: int

    def views(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes with their views of `flat`, which is the partition or a state of its size."""
        for box in self.boxes:
            yield box, flat.narrow(0, self.start + box.offset, box.size).view(box.extent)


class Partitions:
    """The state of DeepSpeed's ZeRO optimizer `zero`, which wraps the optimizer of its partitions."""

    def __init__(
        self, zero: Any, stage: int, named: Mapping[str, nn.Parameter], ema: float | None = None
    ) -> None:
        """Find the fragments of all parameters in `named`. `ema` is the decay of a moving average of the weights."""
        self._zero, self._stage = zero, stage
        self.optimizer: torch.optim.Optimizer = zero.optimizer
        self.fragments = list(_fully_sharded(zero, named) if stage == 3 else _flat(zero, named))
        # all partitions, including those of padding only, because a step updates all of them
        self._all = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        self.average = MovingAverage(ema, self._all)

    @torch.no_grad()
    def begin(self, steps: int) -> None:
        """Create the optimizer state, all zeros, with the step count `steps`. DeepSpeed itself creates it in its first
        step.
        """
        for partition in self._all:
            state = self.optimizer.state[partition]
            for slot in SLOTS:
                state.setdefault(slot, torch.zeros_like(partition)).zero_()
            fused = isinstance(self.optimizer, torch.optim.AdamW)
            # torch's fused AdamW reads a tensor on the device; DeepSpeed's CPU Adam a Python number.
            state["step"] = torch.tensor(float(steps), device=partition.device) if fused else steps

    @property
    def steps(self) -> int:
        """Number of completed optimizer steps."""
        return next(int(self.optimizer.state[p]["step"]) for p in self._all)

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield this rank's weights, optimizer state and averages, fp32. Over all ranks they tile every tensor exactly
        once.
        """
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    yield TensorPiece(name, fragment.shape, box.start, view)

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Load this rank's part of weights, optimiser state and averages, one box of one tensor at a time."""
        self.begin(int(reader.read("optim.step")))
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    view.copy_(reader.read(name, box.start, box.extent))
        self.average.go_on(self.steps)
        self.publish()

    def _tensors(self, fragment: Fragment) -> dict[str, Tensor]:
        """Return the partition of a fragment and its states, by their names in a commit."""
        partition, name = fragment.partition, fragment.name
        found = {f"model.{name}": partition.detach()}
        found |= {f"optim.{name}.{slot}": self.optimizer.state[partition][slot] for slot in SLOTS}
        if partition in self.average.of:
            found[f"{AVERAGE}{name}"] = self.average.of[partition]
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the fp32 partitions to the weights that the forward pass reads, as DeepSpeed does after a step."""
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        # Small parameters stay whole on every rank under ZeRO 3, so their gathered copies must be renewed too.
        kept = self._zero.persistent_parameters
        if kept:
            kept[0].all_gather(kept)


def _flat(zero: Any, named: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """Yield fragments under ZeRO 1 and 2: the parameters of a group are concatenated, and each rank has one range."""
    names = {id(parameter): name for name, parameter in named.items()}
    for partition, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        for parameter in group:
            # DeepSpeed's record of which range of its fp32 partition belongs to which range of a 16-bit parameter (lp:
            # low, hp: high precision).
            found = parameter._hp_mapping
            if found is None:  # the whole parameter belongs to another rank
                continue
            ours, theirs = found.lp_fragment_address, found.hp_fragment_address
            name, shape = names[id(parameter)], tuple(parameter.shape)
            yield _fragment(
                name, shape, begin=ours.start, size=ours.numel, partition=partition, start=theirs.start
            )


def _fully_sharded(zero: Any, named: Mapping[str, Any]) -> Iterator[Fragment]:
    """Yield fragments under ZeRO 3: each rank has a range of every parameter. The last ranks' ranges are shorter and
    padded.
    """
    for name, parameter in named.items():
        group, start, place = zero.grad_position[zero.get_param_id(parameter)]
        # All partitions of a parameter have `place` elements, so the last ones may reach beyond it.
        begin = zero._get_param_partition_rank(parameter) * place
        shape = tuple(parameter.ds_shape)
        size = min(place, math.prod(shape) - begin)
        if size > 0:
            yield _fragment(
                name,
                shape,
                begin=begin,
                size=size,
                partition=zero.fp32_partitioned_groups_flat[group],
                start=start,
            )


def frozen_fragments(named: Mapping[str, Any], rank: int) -> Iterator[Fragment]:
    """Yield this rank's parts of frozen parameters: whole ones, or under ZeRO 3 a range of each."""
    for name, parameter in named.items():
        shape, part = tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.data
        begin, size = 0, math.prod(shape)
        if hasattr(parameter, "ds_tensor"):
            part = parameter.ds_tensor.data
            begin = rank * part.numel()
            size = min(part.numel(), size - begin)
        if size > 0:
            yield _fragment(name, shape, begin=begin, size=size, partition=part.view(-1), start=0)


def _fragment(
    name: str, shape: tuple[int, ...], begin: int, size: int, partition: Tensor, start: int
) -> Fragment:
    whole = Cut(shape, (0,) * len(shape), shape)
    return Fragment(
        name, shape, boxes=boxes_of(whole, begin, begin + size), partition=partition, start=start, size=size
    )


log = logging.getLogger(__name__)

BUCKET = 50_000_000
"""Maximum elements whose gradients are reduced together."""


def open_deepspeed(device: torch.device) -> ModuleType:
    """Return the library, set up for a device and the existing process group.

    Raises InputError if it is not installed.
    """
    # DeepSpeed reads both variables on import and initialisation; without them it looks for a launcher or MPI
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise InputError(
            f"DeepSpeed cannot be imported ({error})",
            "parallel.engine",
            "install deepspeed, or set engine to torch",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls deprecated collectives of torch, which would print a warning on every rank
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # the shared-memory all-reduce is for inference only, and takes minutes to compile
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def settings(train: TrainSpec, on_gpu: float, layout: Layout, elements: int, hidden: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model of `elements` parameters and width `hidden`.

    It sets every option whose default differs from the torch engine.
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
        "gradient_clipping": train.optimizer.clip or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }


def optimizer_of(
    spec: OptimizerSpec, parameters: Iterable[tuple[nn.Parameter, bool, Rate]], offload: bool
) -> torch.optim.Optimizer:
    """Return AdamW over the full parameters, grouped by `groups_of`; DeepSpeed replaces them with its partitions.

    With offload it is DeepSpeed's AdamW for CPUs (Ren et al., 2021, section 5).
    """
    groups = groups_of(spec, parameters)
    if not offload:
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compile_once("cpu_adam", CPUAdamBuilder().load)
    return DeepSpeedCPUAdam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adamw_mode=True)


def compile_once(operator: str, load: Callable[[], object]) -> None:
    """Load an operator of DeepSpeed, which compiles it on first use. One process per machine compiles, and the others
    wait.

    A killed compilation blocks no other process, because the kernel releases its lock.
    Raises InputError if there is no compiler, or if compiling fails.
    """
    where, hint = "parallel.offload", "or set offload to none"
    if shutil.which("ninja") is None:  # DeepSpeed installs ninja beside Python, which may not be on PATH
        os.environ["PATH"] = os.pathsep.join(
            [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        )
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        absent = " and no ".join(missing)
        raise InputError(
            f"offload compiles DeepSpeed's {operator}, but this machine has no {absent}",
            where,
            f"install {' and '.join('g++' if tool == 'c++' else tool for tool in missing)}, {hint}",
        )
    # on import, torch built with CUDA asks for GPUs, which fork servers that import this module must not do
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(operator, verbose=False))
    with open(folder / "in-use", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # PyTorch's own lock is a file. It stays when its process is killed, and others would wait for it forever.
        (folder / "lock").unlink(missing_ok=True)
        if not (folder / f"{operator}.so").exists():
            log.warning("compiling DeepSpeed's %s in %s: about two minutes, once a machine", operator, folder)
        try:
            load()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            why = next((line for line in lines if "error:" in line), lines[-1])
            raise InputError(
                f"DeepSpeed's {operator} does not compile in {folder}: {why.strip()}",
                where,
                f"fix the compiler, {hint}",
            ) from error


class DeepSpeedEngine:
    """The DeepSpeed engine, see `Engine`. DeepSpeed keeps weights, gradients and optimizer state.

    This project computes losses and counts, and writes commits. Gradients are sums over tokens. The number of predicted
    tokens is known only when the optimizer steps. It is then given to DeepSpeed as its loss scale, by which DeepSpeed
    divides before it clips.
    """

    def __init__(self, config: EngineConfig, workload: Workload, layout: Layout, device: Device) -> None:
        self._workload = workload
        self._layout = layout
        self._device = device
        self._seed = config.seed
        self.clock = StepClock(device.device)
        self._mesh = Mesh(layout, self.clock)
        self._losses = losses_of(config, workload, layout, self._mesh, device)
        self._routing = RouterLoad(workload, self._mesh, device.device)
        self._scale = LossScale(config.train.dtype == "fp16")
        deepspeed = open_deepspeed(device.device)
        elements = sum(shape.numel() for shape in workload.shapes.values())
        deepspeed_config = settings(config.train, config.gpus, layout, elements, workload.config.hidden)
        self.model = _build(
            deepspeed,
            workload,
            layout=layout,
            device=device.device,
            config=deepspeed_config,
            in_8_bits=config.train.dtype == "fp8",
            scheme=config.quantize.scheme if config.quantize else None,
        )
        self._rounding = Rounding([self.model], config.quantize)
        recompute(workload.blocks(self.model), layout, config.train.compile)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        rate = rates_of(config.train.optimizer, workload)
        styles = workload.sharding()
        shapes = workload.shapes
        stacks = workload.stacks
        scaled = [
            (p, cut_of(name, shapes[name], styles, self._mesh, stacks).matrix, rate(name))
            for name, p in trained.items()
        ]
        optimizer = optimizer_of(config.train.optimizer, scaled, layout.offload != "none")
        step = _WithLoss(self.model, self._losses, device)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=step, optimizer=optimizer, config=deepspeed_config, dist_init_required=False
        )
        self._partitions = Partitions(self._zero, layout.zero, trained, config.ema)
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        self._frozen = list(frozen_fragments(frozen, self._mesh.rank))
        self._buffers = {n: b for n, b in self.model.named_buffers() if n in workload.shapes}

    def train_step(
        self, micro_batches: Sequence[Batch], lr: float, check: StepCheck | None = None
    ) -> Metrics:
        """See `Engine.train_step`. The engine's rules refuse a check earlier."""
        assert check is None
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
                self._engine.step()  # only counts the micro-batch
        self.clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        loss, extra, count, _ = self._losses.over_ranks(torch.zeros(()))
        routed = self._routing.take([self.model])
        extra = {**extra, **ratios(routed)}
        if self._scale.enabled:
            extra = {**extra, "loss_scale": self._scale.value, "skipped": 0.0}
        # Turn sums into means: DeepSpeed divided by the ranks, and the loss by `expected` instead of the count.
        self._zero.loss_scale = self._scale.value * count / (self._losses.expected * self._layout.dp)
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
        self._rounding.at(self._partitions.steps)
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
    def compute_again(self, micro_batches: Sequence[Batch], exact: bool) -> NoReturn:
        """See `Engine.compute_again`. The engine's rules refuse it earlier."""
        raise NotImplementedError("DeepSpeed sums gradients itself, unseen")

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

    @torch.no_grad()
    def token_log_probabilities(
        self, micro_batches: Sequence[Batch], of_reference: bool = False
    ) -> list[Tensor]:
        """See `Engine.token_log_probabilities`. The engine's rules refuse a reference earlier."""
        assert not of_reference
        self._losses.begin_tokens()
        self._evaluate(micro_batches)
        self._routing.take([self.model])
        return self._losses.token_log_probabilities()

    @torch.no_grad()
    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.log_probabilities`."""
        self._losses.begin_reference()
        self._evaluate(micro_batches)
        self._routing.take([self.model])
        return self._losses.answer_log_probabilities()

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
        self._rounding.at(0)
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
        self._rounding.at(self._partitions.steps)
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
    """The model and its loss as one module. DeepSpeed wraps a module whose output is the loss of a micro-batch."""

    def __init__(self, model: nn.Module, losses: StepLosses, device: Device) -> None:
        super().__init__()
        self.model = model
        self._losses = losses
        self._device = device

    def forward(self, batch: Batch, parts: int) -> Tensor:
        """Return the loss of a micro-batch, an fp32 scalar."""
        with self._device.autocast():
            output = self.model(batch, in_chunks=self._losses.in_chunks(batch))
            return self._losses.of(output, batch, parts)


def _build(
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

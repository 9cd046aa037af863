"""The trace of one rank: build its engine on tensors without memory, run a warm-up step, and record the next ones."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.checkpoint.shared_memory import room_for
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.device import COMPUTE, Device
from orchestrator.parallel.engine_rules import HEAD_TOKENS
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.offload import Offload
from orchestrator.planner.step_trace import CATEGORIES, Memory, NotTraced, StepTrace
from orchestrator.planner.trace.fake_values import stand_in, values_assumed
from orchestrator.planner.trace.messages import Messages
from orchestrator.planner.trace.op_cache import Remembered
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.planner.trace.replaced import replaced
from orchestrator.planner.trace.sample_batch import predicted_share, sample_batch
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.errors import WorkloadError
from workloads.workload import Batch, Workload

CPU = torch.device("cpu")


def trace(spec: JobSpec, workload: Workload, layout: Layout, rank: int) -> StepTrace | NotTraced:
    """Trace one step of `rank` under `layout`, with the job's number of micro-batches; see `traces`."""
    result = traces(spec, workload, layout, rank, [layout.accumulation(spec.train.global_batch)])
    return result if isinstance(result, NotTraced) else result[0]


def traces(
    spec: JobSpec,
    workload: Workload,
    layout: Layout,
    rank: int,
    counts: Sequence[int],
    seconds: float = math.inf,
) -> list[StepTrace] | NotTraced:
    """Trace steps of `rank` under `layout`: its operators and messages in order, and the memory that it holds.

    Args:
        spec: the job.
        workload: the model and its objective; its weights are not read.
        layout: how the ranks divide the work.
        rank: the rank to trace.
        counts: numbers of micro-batches, ascending; one step is recorded for each.
        seconds: limit on the processor time of the trace.

    Returns:
        One trace for each of `counts`, or the reason why there is none.

    Raises:
        RuntimeError: if this process is in a process group.
    """
    if layout.engine != "torch":
        return NotTraced(rank, "DeepSpeed's own memory cannot be followed")
    if spec.train.compile:
        return NotTraced(rank, "compiled blocks are not traced: their kernels choose what they keep")
    try:
        batch = sample_batch(spec.data, spec.seed, spec.workload.draws, workload, layout.micro_batch)
    except (InputError, WorkloadError) as error:
        return NotTraced(rank, str(error))
    assumed: list[str] = []

    def note(line: str) -> None:
        if line not in assumed:
            assumed.append(line)

    on_cpu = not spec.resources.per_worker.gpu
    messages = Messages(on_cpu)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(CPU, stand_in(predicted_share(batch)), messages, Remembered(fake))
    try:
        with (
            _other_ranks(rank, layout.world) as group,
            values_assumed(note, on_cpu),
            _collected(),
            _ended_at(time.process_time() + seconds),
            warnings.catch_warnings(action="ignore"),  # they concern a run, not a plan
        ):
            with fake, recorder:
                shapes: Batch = {name: fake.from_tensor(t) for name, t in batch.items()}
                engine = TorchEngine(spec, workload, layout, Device(CPU, COMPUTE[spec.train.dtype], group))
                if not on_cpu:
                    engine._losses._tokens_at_once = HEAD_TOKENS["cuda"]
                messages.mesh = engine._mesh
                recorder.updates_elsewhere = not on_cpu and isinstance(engine._data, Offload)
                steps = _Steps(engine, shapes, spec.train.optimizer.lr, recorder, messages)
                recorded = [
                    _step_trace(rank, layout, recorder)
                    for _ in steps.record(warm_up(layout, counts[0]), counts)
                ]
                saved = room_for(engine.state())[0]
    except Exception as error:
        if isinstance(error, _TooLong) or isinstance(error.__cause__ or error.__context__, _TooLong):
            return NotTraced(rank, "its step has more operators than can be followed in the time there is")
        return NotTraced(rank, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    size = sum(tensor.nbytes for tensor in batch.values())
    return [
        dataclasses.replace(each, assumed=tuple(assumed), saved=saved, batch_bytes=size) for each in recorded
    ]


def warm_up(layout: Layout, most: int) -> int:
    """Return the micro-batches of the warm-up step, which creates the optimizer state and all buffers.

    One suffices, except that torch's 1F1B requires at least one per stage.
    """
    return min(layout.pp if layout.schedule == "1f1b" else 1, most)


class _Steps:
    """Runs and records steps of an engine on micro-batches of the given shapes."""

    def __init__(
        self,
        engine: TorchEngine,
        shapes: Batch,
        lr: float,
        recorder: Recorder,
        messages: Messages,
    ) -> None:
        self._engine = engine
        self._shapes = shapes
        self._lr = lr
        self._recorder = recorder
        self._messages = messages
        self._batches: list[Batch] = []

    def record(self, warm_up: int, counts: Sequence[int]) -> Iterator[None]:
        """Run a step of `warm_up` micro-batches, then record one for each of `counts`; yields after each of these."""
        recorder = self._recorder
        follow(self._engine, recorder)
        with pipeline_followed(recorder):
            self._step(warm_up)
            for count in counts:
                self._fill(count)
                settle(self._engine, recorder)
                recorder.events = []
                self._messages.made = 0
                with self._messages.record_waits(recorder.events.append, lambda: recorder.phase):
                    self._step(count)
                yield

    def _fill(self, count: int) -> None:
        for _ in range(count - len(self._batches)):
            self._batches.append({name: torch.empty_like(t) for name, t in self._shapes.items()})

    def _step(self, count: int) -> None:
        self._fill(count)
        step(self._engine, self._batches[:count], self._lr, self._recorder)


def step(engine: TorchEngine, batches: Sequence[Batch], lr: float, recorder: Recorder) -> None:
    """Run one step of the engine."""
    recorder.is_update = False
    recorder.place = (None, None)
    recorder.micro_batch = -1
    for tensor in (t for batch in batches for t in batch.values()):
        recorder.held.add(tensor, "other")
    engine.train_step(batches, lr)
    recorder.is_update = False


def settle(engine: TorchEngine, recorder: Recorder) -> None:
    """Assign the memory that stays between steps to its categories, and start to look for the peak."""
    gc.collect()
    for category, tensors in engine.held().items():
        recorder.held.move(tensors, category)
    if recorder.updates_elsewhere:
        recorder.held.leave_out(_on_host(engine))
    recorder.begin()
    recorder.steady = dict(recorder.held.now)


def _on_host(engine: TorchEngine) -> list[Tensor]:
    """Return the tensors that an engine with an offloaded optimizer keeps in host memory."""
    copies = [each for shard in engine._data.shards for each in (shard.parameter, shard.parameter.grad)]
    slots = [each for state in engine._optimizer.state.values() for each in state.values()]
    return [each for each in (*copies, *slots) if isinstance(each, Tensor)]


def follow(engine: TorchEngine, recorder: Recorder) -> None:
    """Keep the recorder informed of the running stage and micro-batch, and of the start of the update."""
    for number, stage in zip(engine.stage_numbers, engine.parallel.stages, strict=True):
        stage.register_forward_pre_hook(_Entered(recorder, number))
    shared = engine.parallel.shared
    sum_tied = shared.sum

    def begin_update() -> None:
        recorder.is_update = True
        recorder.place = (None, None)
        sum_tied()

    # The sum of tied gradients is the engine's first call after the backward passes.
    shared.sum = begin_update  # type: ignore[method-assign]


class _Entered:
    """A hook that runs when a stage begins a forward pass: without a pipeline it is the next micro-batch."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._recorder.in_pipeline is None:
            self._recorder.micro_batch += 1
            self._recorder.place = (self._number, self._recorder.micro_batch)


@contextlib.contextmanager
def pipeline_followed(recorder: Recorder) -> Iterator[None]:
    """Within the context, the recorder knows which stage of a pipeline runs which pass of which micro-batch."""

    def followed(name: str, is_backward: bool) -> Any:
        inner = getattr(_PipelineStageBase, name)

        def run(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            recorder.place = (self.stage_index, chunk)
            recorder.is_backward = is_backward
            recorder.in_pipeline = self.stage_index
            try:
                return inner(self, chunk, *args, **kwargs)
            finally:
                recorder.is_backward = False
                recorder.in_pipeline = None

        return replaced(_PipelineStageBase, name, run)

    with (
        followed("forward_one_chunk", False),
        followed("backward_one_chunk", True),
        followed("backward_weight_one_chunk", True),
    ):
        yield


@contextlib.contextmanager
def _other_ranks(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    """Join a fake process group: collectives return at once and leave their outputs as they are."""
    if dist.is_initialized():
        raise RuntimeError("cannot trace a rank in a process that belongs to a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        # DTensor caches results of operators by their mesh. The mesh of the next trace compares equal, but the groups
        # of the cached one are destroyed.
        _clear_sharding_prop_cache()


class _TooLong(Exception):
    """The trace exceeds its processor time."""


@contextlib.contextmanager
def _ended_at(deadline: float) -> Iterator[None]:
    """Within the context, raise _TooLong when a module starts after `deadline` of the processor's time.

    Operators must not raise it: torch calls some of them where it cannot handle an exception.
    """

    def check(*_: object) -> None:
        if time.process_time() > deadline:
            raise _TooLong

    hook = register_module_forward_pre_hook(check)
    logger = logging.getLogger(schedules.__name__)  # it prints the whole schedule when a stage raises
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        hook.remove()
        logger.setLevel(level)


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Within the context, collect garbage at fixed places only, so that every trace of a step is the same.

    Objects from before are frozen: the collector would take longer to visit them than a small trace takes in all.
    """
    was_enabled = gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _step_trace(rank: int, layout: Layout, recorder: Recorder) -> StepTrace:
    """Return the trace of the step that was recorded last."""
    (phase, stage, micro_batch), peak, parts = recorder.peak
    at_peak = dict(zip(CATEGORIES, parts, strict=True))
    memory = Memory(peak, at_peak, steady=recorder.steady, phase=phase, stage=stage, micro_batch=micro_batch)
    return StepTrace(
        rank,
        layout.to_json(),
        tuple(recorder.events or ()),
        memory,
        crests=tuple(recorder.crests),
    )

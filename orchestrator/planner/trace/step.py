"""The trace of one rank: its engine made and run for two steps without memory, of which the last is recorded."""

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
from unittest.mock import patch

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
from orchestrator.planner.trace.sample_batch import predicted_share, sample_batch
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.errors import WorkloadError
from workloads.workload import Batch, Workload

CPU = torch.device("cpu")


def trace(spec: JobSpec, workload: Workload, layout: Layout, rank: int) -> StepTrace | NotTraced:
    """What `rank` does in one step of the job under `layout`, and what it holds; see `traces`."""
    found = traces(spec, workload, layout, rank, [layout.accumulation(spec.train.global_batch)])
    return found if isinstance(found, NotTraced) else found[0]


def traces(
    spec: JobSpec,
    workload: Workload,
    layout: Layout,
    rank: int,
    counts: Sequence[int],
    seconds: float = math.inf,
) -> list[StepTrace] | NotTraced:
    """What `rank` does in a step of each of these numbers of micro-batches under `layout`, and what it holds.

    Args:
        spec: the job.
        workload: what it trains; its weights are not read.
        layout: of the torch engine.
        rank: whose step.
        counts: how many micro-batches are run, ascending.
        seconds: of the processor, that it may take.

    Raises RuntimeError if this process is in a process group.
    """
    if layout.engine != "torch":
        return NotTraced(rank, "DeepSpeed's own memory cannot be followed")
    if spec.train.compile:
        return NotTraced(rank, "compiled blocks are not traced: their kernels choose what they keep")
    try:
        batch = sample_batch(spec, workload, layout.micro_batch)
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
            warnings.catch_warnings(action="ignore"),  # of a run, and no user's of a plan
        ):
            with fake, recorder:
                shapes: Batch = {name: fake.from_tensor(t) for name, t in batch.items()}
                engine = TorchEngine(spec, workload, layout, Device(CPU, COMPUTE[spec.train.dtype], group))
                if not on_cpu:
                    engine._losses._tokens_at_once = HEAD_TOKENS["cuda"]
                messages.mesh = engine._mesh
                recorder.updates_elsewhere = not on_cpu and isinstance(engine._data, Offload)
                steps = _Steps(engine, shapes, spec.train.optimizer.lr, recorder, messages)
                found = [_found(rank, layout, recorder) for _ in steps.of(warm_up(layout, counts[0]), counts)]
                saved = room_for(engine.state())[0]
    except Exception as error:
        if isinstance(error, _TooLong) or isinstance(error.__cause__ or error.__context__, _TooLong):
            return NotTraced(rank, "its step has more operators than can be followed in the time there is")
        return NotTraced(rank, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    size = sum(tensor.nbytes for tensor in batch.values())
    return [
        dataclasses.replace(each, assumed=tuple(assumed), saved=saved, batch_bytes=size) for each in found
    ]


def warm_up(layout: Layout, most: int) -> int:
    """Micro-batches of a step after which the optimiser has its state and buffers are there: torch's 1F1B refuses less
    than one a stage."""
    return min(layout.pp if layout.schedule == "1f1b" else 1, most)


class _Steps:
    """Steps of an engine with so many micro-batches as are asked for, of the given shapes."""

    def __init__(
        self,
        engine: TorchEngine,
        shapes: Batch,
        lr: float,
        recorder: Recorder,
        messages: Messages,
    ) -> None:
        self._engine, self._shapes, self._lr = engine, shapes, lr
        self._recorder, self._messages = recorder, messages
        self._given: list[Batch] = []

    def of(self, first: int, counts: Sequence[int]) -> Iterator[None]:
        """A step that is not recorded, then one to record of each of the `counts`; goes on behind each of these."""
        recorder = self._recorder
        follow(self._engine, recorder)
        with pipeline_followed(recorder):
            self._step(first)
            for count in counts:
                self._fill(count)
                settle(self._engine, recorder)
                recorder.events, self._messages.made = [], 0
                with self._messages.waits_told(recorder.events.append, lambda: recorder.phase):
                    self._step(count)
                yield

    def _fill(self, count: int) -> None:
        for _ in range(count - len(self._given)):
            self._given.append({name: torch.empty_like(t) for name, t in self._shapes.items()})

    def _step(self, count: int) -> None:
        self._fill(count)
        step(self._engine, self._given[:count], self._lr, self._recorder)


def step(engine: TorchEngine, batches: Sequence[Batch], lr: float, recorder: Recorder) -> None:
    """One step, from its forward pass."""
    recorder.is_update, recorder.place = False, (None, None)
    recorder.micro_batch = -1
    for tensor in (t for batch in batches for t in batch.values()):
        recorder.held.add(tensor, "other")
    engine.train_step(batches, lr)
    recorder.is_update = False


def settle(engine: TorchEngine, recorder: Recorder) -> None:
    """Say what the memory is for that stays between steps, and begin to look for a peak."""
    gc.collect()
    for category, tensors in engine.held().items():
        recorder.held.move(tensors, category)
    if recorder.updates_elsewhere:
        recorder.held.leave_out(_on_host(engine))
    recorder.begin()
    recorder.steady = dict(recorder.held.now)


def _on_host(engine: TorchEngine) -> list[Tensor]:
    """What an engine that offloads its optimiser keeps in host memory."""
    copies = [each for shard in engine._data.shards for each in (shard.parameter, shard.parameter.grad)]
    slots = [each for state in engine._optimizer.state.values() for each in state.values()]
    return [each for each in (*copies, *slots) if isinstance(each, Tensor)]


def follow(engine: TorchEngine, recorder: Recorder) -> None:
    """Have the recorder know which pass, stage and micro-batch runs."""
    for number, stage in zip(engine.stage_numbers, engine.parallel.stages, strict=True):
        stage.register_forward_pre_hook(_Entered(recorder, number))
    shared, summed = engine.parallel.shared, engine.parallel.shared.sum

    def over() -> None:
        recorder.is_update, recorder.place = True, (None, None)
        summed()

    shared.sum = over  # type: ignore[method-assign]


class _Entered:
    """A stage begins the forward pass of its next micro-batch."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._recorder.in_pipeline is None:
            self._recorder.micro_batch += 1
            self._recorder.place = (self._number, self._recorder.micro_batch)


@contextlib.contextmanager
def pipeline_followed(recorder: Recorder) -> Iterator[None]:
    """Within it, the recorder knows which stage of a pipeline runs which pass of which micro-batch."""

    def followed(name: str, is_backward: bool) -> Any:
        inner = getattr(_PipelineStageBase, name)

        def run(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            recorder.place, recorder.is_backward = (self.stage_index, chunk), is_backward
            recorder.in_pipeline = self.stage_index
            try:
                return inner(self, chunk, *args, **kwargs)
            finally:
                recorder.is_backward = False
                recorder.in_pipeline = None

        return patch.object(_PipelineStageBase, name, run)

    with (
        followed("forward_one_chunk", False),
        followed("backward_one_chunk", True),
        followed("backward_weight_one_chunk", True),
    ):
        yield


@contextlib.contextmanager
def _other_ranks(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    """A process group whose other ranks answer at once, with nothing."""
    if dist.is_initialized():
        raise RuntimeError("a process that is a rank cannot trace one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group = dist.new_group

    def mine(ranks: list[int], *_: Any) -> Any:  # of a large world most groups are of others
        return new_group(ranks) if rank in ranks else None

    try:
        assert dist.group.WORLD is not None
        with patch.object(dist, "new_group", mine):
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        # What it remembers of an operator's results names their mesh, whose groups are gone with this one: the next
        # mesh of these ranks equals it.
        _clear_sharding_prop_cache()


class _TooLong(Exception):
    """The trace would take longer than it may."""


@contextlib.contextmanager
def _ended_at(deadline: float) -> Iterator[None]:
    """Within it, _TooLong is raised where a module begins after `deadline` of the processor's time. From within an
    operator nothing may be raised: torch asks tensors for their sizes where it cannot fail."""

    def check(*_: object) -> None:
        if time.process_time() > deadline:
            raise _TooLong

    hook = register_module_forward_pre_hook(check)
    told = logging.getLogger(schedules.__name__)  # it tells its whole schedule where a stage fails
    level = told.level
    told.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        hook.remove()
        told.setLevel(level)


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Memory that only circles of references hold is freed at fixed places alone, so that each trace is the same. What
    was there before is not looked at: that takes longer than a small trace."""
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        if was:
            gc.enable()


def _found(rank: int, layout: Layout, recorder: Recorder) -> StepTrace:
    (phase, stage, micro_batch), peak, parts = recorder.peak
    at_peak = dict(zip(CATEGORIES, parts, strict=True))
    memory = Memory(peak, at_peak, recorder.steady, phase, stage, micro_batch)
    return StepTrace(
        rank,
        layout.to_json(),
        tuple(recorder.events or ()),
        memory,
        tuple(recorder.curve),
        crests=tuple(recorder.crests),
    )

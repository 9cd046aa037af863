"""Steps of an engine that a recorder follows: which stage runs which micro-batch, and what is held between steps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from orchestrator.planner.trace.messages import Messages
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.planner.trace.replaced import replaced
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.workload import Batch


class RecordedSteps:
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
        """Run a step of `warm_up` micro-batches, then record one for each of `counts`; yields after each of these.

        Args:
            warm_up: micro-batches of the first step.
            counts: micro-batches of each recorded step, ascending.
        """
        recorder = self._recorder
        install_hooks(self._engine, recorder)
        with follow_pipeline(recorder):
            self._step(warm_up)
            for count in counts:
                self._fill(count)
                begin_recording(self._engine, recorder)
                recorder.events = []
                self._messages.count = 0
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
    """Run one step of the engine.

    Args:
        engine: computes the step.
        batches: its micro-batches.
        lr: the learning rate.
        recorder: follows the step.
    """
    recorder.is_update = False
    recorder.current_pass = (None, None)
    recorder.micro_batch = -1
    for tensor in (t for batch in batches for t in batch.values()):
        recorder.live.add(tensor, "other")
    engine.train_step(batches, lr)
    recorder.is_update = False


def begin_recording(engine: TorchEngine, recorder: Recorder) -> None:
    """Assign the memory that stays between steps to its categories, and start to look for the peak.

    Args:
        engine: names the tensors that stay between steps.
        recorder: follows the next step.
    """
    gc.collect()
    for category, tensors in engine.resident_tensors().items():
        recorder.live.move(tensors, category)
    if recorder.updates_on_host:
        recorder.live.exclude(_on_host(engine))
    recorder.begin()
    recorder.steady = dict(recorder.live.now)


def _on_host(engine: TorchEngine) -> list[Tensor]:
    """Return the tensors that an engine with an offloaded optimizer keeps in host memory."""
    copies = [tensor for shard in engine.trained.shards for tensor in (shard.parameter, shard.parameter.grad)]
    slots = [tensor for state in engine.trained.optimizer.state.values() for tensor in state.values()]
    return [tensor for tensor in (*copies, *slots) if isinstance(tensor, Tensor)]


def install_hooks(engine: TorchEngine, recorder: Recorder) -> None:
    """Keep the recorder informed of the running stage and micro-batch, and of the start of the update.

    Args:
        engine: runs the steps.
        recorder: follows them.
    """
    for number, stage in zip(engine.stage_numbers, engine.parallel.stages, strict=True):
        stage.register_forward_pre_hook(_Entered(recorder, number))
    shared = engine.parallel.shared
    sum_tied = shared.sum

    def begin_update() -> None:
        recorder.is_update = True
        recorder.current_pass = (None, None)
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
            self._recorder.current_pass = (self._number, self._recorder.micro_batch)


@contextlib.contextmanager
def follow_pipeline(recorder: Recorder) -> Iterator[None]:
    """Within the context, the recorder knows which stage of a pipeline runs which pass of which micro-batch."""

    def followed(name: str, is_backward: bool) -> Any:
        inner = getattr(_PipelineStageBase, name)

        def run(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            recorder.current_pass = (self.stage_index, chunk)
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

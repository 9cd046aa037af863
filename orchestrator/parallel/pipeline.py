"""Pipeline parallelism: micro-batches through stages, in the order of a published schedule.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), interleaved zero bubble and ZB-V
(Qi et al., 2024), as `torch.distributed.pipelining` has them. Every rank of a pipeline reads the whole
micro-batch, so that only hidden states travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from orchestrator.parallel.between_stages import between_stages
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import SEVERAL_STAGES, SPLIT, Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.pipeline_stage import Stage
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, PIPELINE, StepClock
from orchestrator.parallel.zero_bubble import DeferredGradients
from workloads.workload import Batch, Workload

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Runs this rank's stages for all micro-batches."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        losses: StepLosses,
        device: Device,
        clock: StepClock,
    ) -> None:
        self._stages, self._workload, self._layout, self._mesh = stages, workload, layout, mesh
        self._clock = clock
        others = (mesh.coordinate[axis] for axis in mesh.coordinate if axis != "pp")
        self._is_recorded = not any(others)  # one rank of those that do the same
        self._losses, self._device = losses, device
        ways, prompt = mesh.tp.size if layout.sequence else 1, getattr(stages[0], "prompt_length", 0)
        self._between = between_stages(workload.config, ways, prompt)
        self._numbers = layout.stages_of(mesh.coordinate["pp"])
        self._batches: list[Batch] = []
        self._turns: dict[int, Iterator[Batch]] = {}
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[Stage]]] = {}
        self._entering: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        splits = layout.schedule in SPLIT
        self._deferred = {
            n: DeferredGradients(s) for n, s in zip(self._numbers, stages, strict=True) if splits
        }
        for stage, number in zip(stages, self._numbers, strict=True):
            # The stage itself must stay the module that FSDP2 wraps, so its forward is replaced in place.
            stage.forward = self._forward_of(stage.forward, number)

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        self._begin(micro_batches)
        self._clock.switch(PIPELINE)
        # The schedules cut a target into micro-batches; the losses read what they need of the batch.
        schedule, stages = self._schedule(self._batches[0])
        with self._device.casting_once():
            schedule.step(target=torch.empty(len(self._batches)), return_outputs=False)
        for stage in stages:
            stage.wait_for_sends()
        self._end()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Losses only, in ticks: stage s computes micro-batch t - s in tick t, and after each tick all ranks send and
        receive in one batch.

        What one rank sends in a tick the other receives in the same one, and messages of a batch do not wait for each
        other: no order of theirs can block, on two stages a rank either. (Torch's ZB-V cannot run without backward.)
        """
        self._begin(micro_batches)
        arrived: dict[int, tuple[Tensor, ...]] = {}
        for tick in range(len(self._batches) + self._layout.stages - 1):
            left = {}
            for stage, number in zip(self._stages, self._numbers, strict=True):
                if 0 <= tick - number < len(self._batches):
                    self._current = tick - number
                    left[number] = stage(*arrived.pop(number, ()))
            arrived = self._exchange(tick, left)
        self._end()

    def _begin(self, micro_batches: Sequence[Batch]) -> None:
        self._batches = [self._losses.prepare(batch) for batch in micro_batches]
        # Every schedule takes a stage's forward passes in the order of the micro-batches.
        self._turns = {number: iter(self._batches) for number in self._numbers}

    def _end(self) -> None:
        self._batches, self._turns = [], {}

    def _exchange(self, tick: int, left: Mapping[int, tuple[Tensor, ...]]) -> dict[int, tuple[Tensor, ...]]:
        """Send on what stages have computed in this tick; returns what they are to be given in the next one."""
        arrived: dict[int, tuple[Tensor, ...]] = {}
        sends: list[dist.P2POp] = []
        receives: list[dist.P2POp] = []
        for number, output in left.items():
            if number + 1 < self._layout.stages:
                target = self._rank_of(number + 1)
                if target == self._mesh.rank:
                    arrived[number + 1] = output
                else:
                    sends += [self._message(dist.isend, t.contiguous(), target) for t in output]
        for number in self._numbers:
            index = tick + 1 - number
            if number == 0 or not 0 <= index < len(self._batches):
                continue
            source = self._rank_of(number - 1)
            if source != self._mesh.rank:
                carried = self._carried(number, self._batches[index])
                arrived[number] = tuple(torch.empty_like(t, device=self._device.device) for t in carried)
                receives += [self._message(dist.irecv, t, source) for t in arrived[number]]
        if sends or receives:
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()
        return arrived

    def _rank_of(self, number: int) -> int:
        return self._mesh.pp.ranks[self._layout.pipeline_rank_of(number)]

    def _message(self, how: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(how, tensor, peer, self._mesh.pp.handle)

    def _forward_of(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        first, last = number == 0, number == self._layout.stages - 1

        def run(*received: Tensor) -> Tensor | tuple[Tensor, ...]:
            batch = next(self._turns[number])
            # Autocast takes a leaf that needs a gradient for a weight, and keeps its copy until the step ends.
            received = tuple(tensor.view_as(tensor) for tensor in received)
            with self._computing(FORWARD), self._device.autocast():
                how = {"in_chunks": self._losses.in_chunks} if last else {}
                output = forward(batch, **({} if first else self._between.unpack(received)), **how)
                if last:
                    return self._losses.of(output, batch, len(self._batches))
            return self._between.pack(output)

        return run

    def _schedule(self, batch: Batch) -> tuple[Any, list[Stage]]:
        """The schedule for batches of this shape, and its stages; made once, since stages exchange what they send at
        the start."""
        key = (len(self._batches), *self._between.shapes(batch))
        if key not in self._schedules:
            stages = [
                self._pipeline_stage(stage, number, batch)
                for stage, number in zip(self._stages, self._numbers, strict=True)
            ]
            several = self._layout.schedule in SEVERAL_STAGES
            schedule = SCHEDULES[self._layout.schedule](
                stages if several else stages[0],
                n_microbatches=len(self._batches),
                loss_fn=lambda loss, _: loss,
                scale_grads=False,
            )
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _pipeline_stage(self, stage: nn.Module, number: int, batch: Batch) -> Stage:
        """Shapes are given, so that nothing is run, or pickled between ranks, to find them out."""
        last = number == self._layout.stages - 1
        leaving = (torch.empty((), device="meta"),) if last else self._carried(number + 1, batch)
        made = Stage(
            stage,
            number,
            self._layout.stages,
            self._device.device,
            input_args=self._carried(number, batch) if number else (),
            output_args=tuple(t.requires_grad_() for t in leaving),
            group=self._mesh.pp.handle,
            sends_alone=self._layout.schedule in SEVERAL_STAGES,
            dw_builder=self._deferred[number].take if number in self._deferred else None,
        )
        made.forward_one_chunk = self._noting_number(made.forward_one_chunk)  # type: ignore[method-assign]
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            setattr(made, name, self._computing(BACKWARD)(getattr(made, name)))
        for name, kind in (("forward", "F"), ("backward", "B"), ("backward_weight", "W")):
            setattr(
                made, f"{name}_one_chunk", self._recorded(kind, number, getattr(made, f"{name}_one_chunk"))
            )
        return made

    def _recorded(self, kind: str, stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which a timeline has if the step is recorded."""

        def run(part: int, *given: Any, **rest: Any) -> Any:
            timeline = self._clock.timeline
            if timeline is None or not self._is_recorded:
                return call(part, *given, **rest)
            began = timeline.now()
            found = call(part, *given, **rest)
            inputs_alone = kind == "B" and not rest.get("full_backward", True)
            timeline.add("I" if inputs_alone else kind, stage, part, began)
            return found

        return run

    def _noting_number(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(number: int, *given: Any, **rest: Any) -> Any:
            self._current = number
            return forward(number, *given, **rest)

        return run

    @contextlib.contextmanager
    def _computing(self, part: str) -> Iterator[None]:
        """What a schedule computes; all else is the pipeline's time, if a step is timed at all."""
        if not self._clock.runs:
            yield
            return
        before = self._clock.switch(part)
        try:
            yield
        finally:
            self._clock.switch(before)

    def _carried(self, number: int, batch: Batch) -> tuple[Tensor, ...]:
        """What enters stage `number`, on the meta device; found once for batches of this shape, since an own model is
        run for it."""
        key = (number, *self._between.shapes(batch))
        if key not in self._entering:
            first, _ = self._layout.layers_of(len(self._workload.stages()) + 1, number)
            self._entering[key] = self._between.carried(first, batch)
        return self._entering[key]

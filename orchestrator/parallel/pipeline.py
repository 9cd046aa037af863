"""Pipeline parallelism: micro-batches pass through stages in the order of a published schedule.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), interleaved zero bubble and ZB-V
(Qi et al., 2024), each from `torch.distributed.pipelining`. Every rank of a pipeline reads the whole micro-batch, so
ranks send each other hidden states and their gradients only.

Zero-bubble schedules split the backward pass into I (gradient of the input, which the stage before waits for) and W
(gradient of the weights, which nobody waits for and which fills the bubble). `DeferredGradients` is that split.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    schedules,
)

from orchestrator.parallel.between_stages import between_stages
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import SEVERAL_STAGES, SPLIT, Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, PIPELINE, StepClock
from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import Factor, LoraLinear
from workloads.adapters.nf4 import QuantisedWeight, product
from workloads.model import float8
from workloads.model.fake_quantise import FakeQuantiser
from workloads.model.float8 import Float8Linear
from workloads.model.heads import VocabularyProjection
from workloads.workload import Batch, Workload

Waiting = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""A linear map's input [.., in], the gradient of its output [.., out], its weight [out, in] and its bias [out]."""


class DeferredGradients:
    """Postpones the weight gradients of one stage's linear layers: the W of a zero-bubble schedule.

    Experts, layers with fake quantisation and classes that users derive from linear layers are excluded: their weight
    gradients are computed in I.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._waiting: list[Waiting] = []
        for module in stage.modules():
            # A derived class may compute something else, and a parametrised weight is not a leaf with a gradient.
            is_plain_linear = type(module) in (nn.Linear, Float8Linear)
            if is_plain_linear and isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter):
                linear = partial(self.linear, in_8_bits=isinstance(module, Float8Linear))
                module.forward = partial(_apply, module, linear)  # type: ignore[method-assign]
            elif isinstance(module, RowLinear | VocabularyProjection | LoraLinear | Factor):
                if isinstance(module.product, FakeQuantiser):
                    continue
                module.product = partial(self.linear, in_8_bits=module.product is float8.linear)

    def take(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients of the last backward pass (torch's `dw_builder`)."""
        # A copy: the next micro-batch's backward pass fills the same list before this one's W runs.
        waiting = list(self._waiting)
        self._waiting.clear()
        return partial(_add_gradients, waiting)

    def linear(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None = None,
        in_8_bits: bool = False,
    ) -> Tensor:
        """Compute x @ weight.T + bias, as `F.linear` or `float8.linear`, and postpone the weight's gradient.

        Args:
            x: [.., in].
            weight: [out, in].
            bias: [out], or None.
            in_8_bits: whether the product is that of `float8.linear`.

        Returns:
            [.., out].
        """
        if isinstance(weight, QuantisedWeight):
            return product(x, weight)
        # In an evaluation, and for a frozen weight, nothing is left to postpone.
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return (float8.linear if in_8_bits else F.linear)(x, weight, bias)
        output: Tensor = _Linear.apply(x, weight, bias, self._waiting.append, in_8_bits)
        return output


def _apply(module: nn.Linear, linear: Callable[..., Tensor], x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """y = x @ W.T + b, whose backward pass returns dx = dy @ W and queues (x, dy) for dW = dy.T @ x and db = sum dy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wait: Callable[..., None],
        in_8_bits: bool,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # The backward pass runs outside of autocast, so its factors are cast here already.
        x = x.to(dtype)
        ctx.save_for_backward(x)
        # Not through save_for_backward: recomputation would return another tensor than the parameter, whose `grad` is
        # what the queue must fill.
        ctx.weight = weight
        ctx.bias = bias
        ctx.wait = wait
        ctx.in_8_bits = in_8_bits
        if in_8_bits:
            y = float8.forward(x, weight)
            return y if bias is None else y + bias.to(dtype)
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.wait((x, gradient, ctx.weight, ctx.bias))
        input_gradient = float8.backward if ctx.in_8_bits else _gradient_of_input
        return input_gradient(gradient, ctx.weight), None, None, None, None


def _gradient_of_input(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight.to(gradient.dtype)


@torch.no_grad()
def _add_gradients(waiting: list[Waiting]) -> None:
    """Add dW = dy.T @ x and db = sum dy to the parameters, in backward order and with autograd's own products.

    The bits are then those of a schedule that does not split its backward pass.
    """
    while waiting:
        x, gradient, weight, bias = waiting.pop(0)
        # One product over all tokens, as autograd makes it: a sum over several products would round differently.
        rows = gradient.flatten(0, -2)  # [tokens, out]
        _add(weight, rows.t() @ x.flatten(0, -2))
        if bias is not None and bias.requires_grad:
            _add(bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


class Stage(PipelineStage):
    """A `PipelineStage` that allocates receive buffers when they are needed and frees them after use.

    torch allocates a buffer for every micro-batch of the step up front. Here a buffer lives from the receive to the
    end of the pass that reads it, so memory follows the schedule's number of micro-batches in flight.

    With `sends_alone` (schedules with several stages per rank send each message in a batch of its own) the stage sends
    itself and drops outputs that have arrived. gloo knows that only after `wait`. The wait for an output's send is
    therefore postponed until its gradient comes back, when it takes no time; sends of gradients get no answer and are
    waited for at the end of the step.
    """

    def __init__(self, *args: Any, sends_alone: bool, among: ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sends_alone = sends_alone
        self._among = among
        # P2P works own their tensors until they are waited for, so an entry here keeps an output [B, L, hidden] in
        # memory.
        self._outputs: dict[int, list[dist.Work]] = {}  # sends of outputs, by micro-batch
        self._gradients: list[dist.Work] = []  # sends of gradients

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        # Shapes are equal for all micro-batches, so torch sets up one and the others copy it without its buffer.
        super()._setup_forward_recv_info(1, has_backward)
        first = self.args_recv_info[0]
        for number in range(num_microbatches):
            self.args_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        # torch has set it to the 1 above, and refuses numbers of micro-batches beyond it.
        self.chunks = num_microbatches
        first = self.grad_recv_info[0]
        for number in range(num_microbatches):
            self.grad_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's input, into new buffers."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's output; empty if the stage has sent them itself."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._sends_alone:
            return ops
        # Drop finished sends at each new one, where the backend reports them: otherwise all outputs of the step would
        # stay in memory.
        self._outputs = {
            number: unfinished
            for number, works in self._outputs.items()
            if (unfinished := _unfinished(works))
        }
        self._outputs[fwd_chunk_id] = _start(ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradient of a micro-batch's input; empty if the stage has sent them itself."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._sends_alone:
            return ops
        self._gradients = [*_unfinished(self._gradients), *_start(ops)]
        return []

    def wait_for_sends(self) -> None:
        """Wait for all sends of this stage in a step."""
        for work in [*(work for works in self._outputs.values() for work in works), *self._gradients]:
            work.wait()
        self._outputs = {}
        self._gradients = []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradient of a micro-batch's output, into new buffers."""
        # The last stage computes its loss itself and receives no gradient.
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of an output that another stage of this rank has read; a missing one becomes zeros.

        Args:
            next_stage_bwd_outputs: the gradients of the other stage's inputs.
            mb_index: number of the micro-batch.
        """
        # Under ZB-V a rank has two stages, and the turn of the V passes a gradient within the rank instead of by a
        # message.
        infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._allocate(tuple(info for info, gradient in infos if gradient is None))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch. Autograd holds its input from here on, so the buffer is dropped.

        Args:
            fwd_chunk_id: number of the micro-batch.
            *args: of torch's method.
            **kwargs: of torch's method.
        """
        self._see_arrived(self.args_recv_info[fwd_chunk_id])
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _free(self.args_recv_info[fwd_chunk_id])
        for tensor in output if isinstance(output, tuple) else (output,):
            self._among.sent(tensor)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch, and drop its output and the gradient's buffer.

        Args:
            bwd_chunk_id: number of the micro-batch.
            *args: of torch's method.
            **kwargs: of torch's method.
        """
        if self.has_backward and not self.is_last:
            self._see_arrived(self.grad_recv_info[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for gradient in self.bwd_cache.get(bwd_chunk_id, ()):
            if gradient is not None:
                self._among.sent(gradient)
        for work in self._outputs.pop(bwd_chunk_id, ()):
            work.wait()  # returns at once: the output arrived, since its gradient is here
        if self.has_backward:
            _free(self.grad_recv_info[bwd_chunk_id])

    def _see_arrived(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if info.buffer is not None:
                self._among.received(info.buffer)

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(
                    meta.shape, meta.stride, dtype=meta.dtype, device=self.device
                )


def _start(ops: list[dist.P2POp]) -> list[dist.Work]:
    return list(schedules._batch_p2p(ops))


def _unfinished(works: list[dist.Work]) -> list[dist.Work]:
    return [work for work in works if not work.is_completed()]


def _without_buffer(info: Any) -> Any:
    copied = copy.copy(info)
    copied.buffer = None
    return copied


def _free(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Runs this rank's stages for all micro-batches of a step."""

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
        self._stages = stages
        self._workload = workload
        self._layout = layout
        self._mesh = mesh
        self._losses = losses
        self._device = device
        self._clock = clock
        # Ranks that differ in the other axes run the same actions, so one pipeline records them for a timeline.
        other_indices = (mesh.coordinate[axis] for axis in mesh.coordinate if axis != "pp")
        self._is_recorded = not any(other_indices)
        self._between = between_stages(
            workload.config,
            ways=mesh.tp.size if layout.sequence else 1,
            prompt=getattr(stages[0], "prompt_length", 0),
        )
        # Numbers of this rank's stages in the whole pipeline.
        self._numbers = layout.stages_of(mesh.coordinate["pp"])
        # The micro-batches of the running step, and for each stage the ones that it has not yet run.
        self._batches: list[Batch] = []
        self._remaining: dict[int, Iterator[Batch]] = {}
        # Schedules with their stages, and what enters each stage, by shapes of a batch.
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[Stage]]] = {}
        self._entering: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        splits = layout.schedule in SPLIT
        self._deferred = {
            n: DeferredGradients(s) for n, s in zip(self._numbers, stages, strict=True) if splits
        }
        for stage, number in zip(stages, self._numbers, strict=True):
            # FSDP2 wraps this very module, so its forward is replaced in place and no wrapper put around it.
            stage.forward = self._forward_of(stage.forward, number)

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        self._begin(micro_batches)
        self._clock.switch(PIPELINE)
        schedule, stages = self._schedule(self._batches[0])
        with self._device.casting_once():
            # torch's schedules must cut a target into micro-batches. It is a dummy: `_forward_of` computes the loss.
            # `return_outputs=False`: the losses are summed in `StepLosses`, and merged outputs of all micro-batches
            # would only take memory.
            schedule.step(target=torch.empty(len(self._batches)), return_outputs=False)
        for stage in stages:
            stage.wait_for_sends()
        self._end()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the losses only, in ticks.

        In tick t stage s computes micro-batch t - s, for t = 0 .. micro-batches + stages - 2. After each tick all
        ranks send and receive in one batch, whose messages do not wait for each other. Every send has its receive in
        the same tick, so no order of messages can deadlock, with several stages per rank either. torch's schedules are
        not used here because its ZB-V cannot run without a backward pass.
        """
        self._begin(micro_batches)
        arrived: dict[int, tuple[Tensor, ...]] = {}
        for tick in range(len(self._batches) + self._layout.stages - 1):
            outputs = {}
            for stage, number in zip(self._stages, self._numbers, strict=True):
                if 0 <= tick - number < len(self._batches):
                    outputs[number] = stage(*arrived.pop(number, ()))
            arrived = self._exchange(tick, outputs)
        self._end()

    def _begin(self, micro_batches: Sequence[Batch]) -> None:
        self._batches = [self._losses.prepare(batch) for batch in micro_batches]
        # Every schedule takes a stage's forward passes in the order of the micro-batches.
        self._remaining = {number: iter(self._batches) for number in self._numbers}

    def _end(self) -> None:
        self._batches = []
        self._remaining = {}

    def _exchange(
        self, tick: int, outputs: Mapping[int, tuple[Tensor, ...]]
    ) -> dict[int, tuple[Tensor, ...]]:
        """Send the outputs of this tick; return the inputs of the next one, each by stage."""
        arrived: dict[int, tuple[Tensor, ...]] = {}
        sends: list[dist.P2POp] = []
        receives: list[dist.P2POp] = []
        for number, output in outputs.items():
            if number + 1 < self._layout.stages:
                # Interleaved schedules and ZB-V put neighbouring stages on one rank, where the output needs no
                # message.
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
                # A receive needs the shape before the message comes: lengths vary between batches of an evaluation.
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
        first = number == 0
        last = number == self._layout.stages - 1

        def run(*received: Tensor) -> Tensor | tuple[Tensor, ...]:
            batch = next(self._remaining[number])
            # Received tensors are leaves that need gradients. Autocast would take them for weights and keep their casts
            # until the step ends; a view is no leaf.
            received = tuple(tensor.view_as(tensor) for tensor in received)
            with self._computing(FORWARD), self._device.autocast():
                arguments = {} if first else self._between.unpack(received)
                if last:
                    arguments["in_chunks"] = self._losses.in_chunks(batch)
                output = forward(batch, **arguments)
                if last:
                    return self._losses.of(output, batch, len(self._batches))
            return self._between.pack(output)

        return run

    def _schedule(self, batch: Batch) -> tuple[Any, list[Stage]]:
        """Return the schedule and its stages for batches of this shape.

        They are built once per shape, because building them exchanges messages between stages.
        """
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
                # torch would divide gradients by the number of micro-batches, but `StepLosses` already divides by the
                # labels of the global batch.
                scale_grads=False,
            )
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _pipeline_stage(self, stage: nn.Module, number: int, batch: Batch) -> Stage:
        """Return torch's stage. Shapes are passed in; else torch runs the model and pickles shapes between ranks."""
        last = number == self._layout.stages - 1
        # The last stage returns a scalar, the loss of its micro-batch.
        leaving = (torch.empty((), device="meta"),) if last else self._carried(number + 1, batch)
        pipeline_stage = Stage(
            stage,
            number,
            self._layout.stages,
            self._device.device,
            input_args=self._carried(number, batch) if number else (),
            output_args=tuple(t.requires_grad_() for t in leaving),
            group=self._mesh.pp.handle,
            sends_alone=self._layout.schedule in SEVERAL_STAGES,
            among=self._mesh.pp,
            dw_builder=self._deferred[number].take if number in self._deferred else None,
        )
        for method in ("backward_one_chunk", "backward_weight_one_chunk"):
            setattr(pipeline_stage, method, self._computing(BACKWARD)(getattr(pipeline_stage, method)))
        for name, kind in (("forward", "F"), ("backward", "B"), ("backward_weight", "W")):
            method = f"{name}_one_chunk"
            setattr(pipeline_stage, method, self._recorded(kind, number, getattr(pipeline_stage, method)))
        return pipeline_stage

    def _recorded(self, kind: str, stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an action so that the timeline gets its time, if this step is recorded.

        `kind` is F, B or W. A backward pass of the inputs alone is recorded as I.
        """

        def run(part: int, *args: Any, **kwargs: Any) -> Any:
            timeline = self._clock.timeline
            if timeline is None or not self._is_recorded:
                return call(part, *args, **kwargs)
            started = timeline.now()
            output = call(part, *args, **kwargs)
            is_inputs_alone = kind == "B" and not kwargs.get("full_backward", True)
            timeline.add("I" if is_inputs_alone else kind, stage, part, started)
            return output

        return run

    @contextlib.contextmanager
    def _computing(self, part: str) -> Iterator[None]:
        """Count the time within as computing; the clock counts all other time of a schedule as the pipeline's."""
        if not self._clock.runs:
            yield
            return
        before = self._clock.switch(part)
        try:
            yield
        finally:
            self._clock.switch(before)

    def _carried(self, number: int, batch: Batch) -> tuple[Tensor, ...]:
        """Return what enters stage `number`, on the meta device.

        The result is kept for each shape of a batch, because a user's model must be run to find it.
        """
        key = (number, *self._between.shapes(batch))
        if key not in self._entering:
            first, _ = self._layout.layers_of(len(self._workload.stages()) + 1, number)
            self._entering[key] = self._between.carried(first, batch)
        return self._entering[key]

"""Pipeline parallelism: micro-batches through stages, in the order of a published schedule.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), interleaved zero bubble and ZB-V
(Qi et al., 2024), as `torch.distributed.pipelining` has them. Every rank of a pipeline reads the whole
micro-batch, so that only hidden states travel.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

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

from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import SEVERAL_STAGES, SPLIT, Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, PIPELINE, StepClock
from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import Factor, LoraLinear
from workloads.adapters.nf4 import QuantisedWeight, product
from workloads.hf.hf_class import HuggingFaceModel
from workloads.model import float8
from workloads.model.float8 import Float8Linear
from workloads.model.heads import VocabularyProjection
from workloads.own.declared import stages_of
from workloads.own.model import OwnModel
from workloads.own.network import Handed, through
from workloads.workload import Batch, Workload

Waiting = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Input [.., in] and gradient of the output [.., out] of a linear map, its weight and its bias."""


class DeferredGradients:
    """The queue of one stage. Experts are not in it, nor what users derive from linear layers: the gradients of their
    weights come with the backward pass."""

    def __init__(self, stage: nn.Module) -> None:
        self._waiting: list[Waiting] = []
        for module in stage.modules():
            # A class of its own computes something else, and a weight that is computed has no gradient of its own.
            known = type(module) in (nn.Linear, Float8Linear)
            if known and isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter):
                linear = partial(self.linear, in_8_bits=isinstance(module, Float8Linear))
                module.forward = partial(_of, module, linear)  # type: ignore[method-assign]
            elif isinstance(module, RowLinear | VocabularyProjection | LoraLinear | Factor):
                module.product = partial(self.linear, in_8_bits=module.product is float8.linear)

    def take(self) -> Callable[[], None]:
        """What is left to do for the backward pass that ended last: torch's `dw_builder`."""
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
        """As `torch.nn.functional.linear`, or `float8.linear`."""
        if isinstance(weight, QuantisedWeight):
            return product(x, weight)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return (float8.linear if in_8_bits else F.linear)(x, weight, bias)
        found: Tensor = _Linear.apply(x, weight, bias, self._waiting.append, in_8_bits)
        return found


def _of(module: nn.Linear, linear: Callable[..., Tensor], x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """A linear map whose backward pass hands on the gradient of its input alone."""

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
        x = x.to(dtype)
        ctx.save_for_backward(x)
        # The parameters themselves: recomputation would give back a saved one as another tensor.
        ctx.weight, ctx.bias, ctx.wait, ctx.in_8_bits = weight, bias, wait, in_8_bits
        if in_8_bits:
            y = float8.forward(x, weight)
            return y if bias is None else y + bias.to(dtype)
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.wait((x, gradient, ctx.weight, ctx.bias))
        back = float8.backward if ctx.in_8_bits else _of_input
        return back(gradient, ctx.weight), None, None, None, None


def _of_input(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight.to(gradient.dtype)


@torch.no_grad()
def _add_gradients(waiting: list[Waiting]) -> None:
    """Into the parameters, in the order of the backward pass, with the products that autograd would make."""
    while waiting:
        x, gradient, weight, bias = waiting.pop(0)
        rows = gradient.flatten(0, -2)
        _add(weight, rows.t() @ x.flatten(0, -2))
        if bias is not None and bias.requires_grad:
            _add(bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


class Stage(PipelineStage):
    """As `PipelineStage`, for plain tensors whose shapes were given.

    Where a schedule sends each message in a batch of its own, `sends_alone`, the stage sends itself, and lets go of
    what has arrived. Of gloo that is known only by waiting, which takes no time where the answer is here; what has none
    is waited for at the end of the step.
    """

    def __init__(self, *given: Any, sends_alone: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self._sends_alone = sends_alone
        self._outputs: dict[int, list[dist.Work]] = {}
        self._gradients: list[dist.Work] = []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        first = self.args_recv_info[0]
        for number in range(num_microbatches):
            self.args_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        first = self.grad_recv_info[0]
        for number in range(num_microbatches):
            self.grad_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of a micro-batch's input."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's output, if the schedule is to do them."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._sends_alone:
            return ops
        self._outputs = {number: left for number, works in self._outputs.items() if (left := _left(works))}
        self._outputs[fwd_chunk_id] = _begun(ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradient of a micro-batch's input, if the schedule is to do them."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._sends_alone:
            return ops
        self._gradients = [*_left(self._gradients), *_begun(ops)]
        return []

    def wait_for_sends(self) -> None:
        """Wait for all that this stage has sent in a step."""
        for work in [*(work for works in self._outputs.values() for work in works), *self._gradients]:
            work.wait()
        self._outputs, self._gradients = {}, []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradient of a micro-batch's output."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """The gradient of an output that another stage of this rank has read; zeros where there is none."""
        infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._allocate(tuple(info for info, gradient in infos if gradient is None))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """The forward pass of a micro-batch; its input lives on in what the backward pass needs."""
        output = super().forward_one_chunk(fwd_chunk_id, *given, **named)
        _free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        """The backward pass of a micro-batch."""
        super().backward_one_chunk(bwd_chunk_id, *given, **named)
        for work in self._outputs.pop(bwd_chunk_id, ()):
            work.wait()  # the gradient of what was sent is here
        if self.has_backward:
            _free(self.grad_recv_info[bwd_chunk_id])

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(
                    meta.shape, meta.stride, dtype=meta.dtype, device=self.device
                )


def _begun(ops: list[dist.P2POp]) -> list[dist.Work]:
    return list(schedules._batch_p2p(ops))


def _left(works: list[dist.Work]) -> list[dist.Work]:
    return [work for work in works if not work.is_completed()]


def _without_buffer(info: Any) -> Any:
    found = copy.copy(info)
    found.buffer = None
    return found


def _free(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None


class BetweenStages(Protocol):
    """What a kind of model hands on."""

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """The tensors of a stage's output that are sent; neither views nor what was received, which the schedules
        detach in place."""

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """The arguments of the next stage's forward pass, besides the batch."""

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """What enters a stage that begins with this layer, on the meta device. It is fp32 under any compute type."""

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """What of a batch decides the shapes of `carried`."""


class OfTransformer:
    """Hidden states, the routers' loss if there are experts, the decoder's memory."""

    def __init__(self, config: Any, ways: int, prompt: int) -> None:
        """Sequences are cut into `ways`, and `prompt` positions stand before them."""
        self._config, self._ways, self._prompt = config, ways, prompt

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        extra = output.extra
        if self._config.moe:
            if (
                extra is None
            ):  # no layer so far has experts; the sum starts at zero, and gradients may come back
                extra = 0.0 * output.hidden.flatten()[0].float()
            extra = torch.stack([extra])
        memory = None if output.memory is None else output.memory.clone()
        return tuple(t for t in (output.hidden, extra, memory) if t is not None)

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """See `BetweenStages`."""
        parts = list(received)
        found = {"hidden": parts.pop(0)}
        if self._config.moe:
            found["extra"] = parts.pop(0).reshape(())
        return found | ({"memory": parts.pop()} if parts else {})

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        config = self._config
        size, length = batch["tokens"].shape[:2]
        first = torch.empty(size, length // self._ways + self._prompt, config.hidden, device="meta")
        extra = (torch.empty(1, device="meta"),) if config.moe else ()
        if config.architecture == "encoder-decoder" and layer > config.layers:
            hidden = torch.empty(size, batch["decoder_tokens"].shape[1], config.hidden, device="meta")
            carried = (hidden, *extra, first)
        else:
            carried = (first, *extra)
        return tuple(t.requires_grad_() for t in carried)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple(batch[name].shape for name in ("tokens", "decoder_tokens") if name in batch)


class OfOwnModel:
    """What its modules return, found by running them without memory."""

    def __init__(self, config: OwnModel) -> None:
        self._config = config

    def pack(self, output: Handed) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return tuple(
            t.clone(memory_format=torch.contiguous_format)
            if t._is_view() or t.is_leaf or not t.is_contiguous()
            else t
            for t in output.tensors
        )

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """See `BetweenStages`."""
        return {"handed": received}

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        with torch.no_grad(), torch.device("meta"):
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
            found = through(stages_of(self._config.bare), empty, 0, layer)
        return tuple(torch.empty(t.shape, device="meta").requires_grad_() for t in found)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))


class OfHuggingFaceClass(OfOwnModel):
    """Hidden states [B, L, hidden]."""

    def __init__(self, config: HuggingFaceModel) -> None:
        self._hidden = config.hidden

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return (torch.empty(*batch["tokens"].shape[:2], self._hidden, device="meta").requires_grad_(),)


def between_stages(config: Any, ways: int, prompt: int) -> BetweenStages:
    """That of a model, see `OfTransformer`."""
    if isinstance(config, HuggingFaceModel):
        return OfHuggingFaceClass(config)
    return OfOwnModel(config) if isinstance(config, OwnModel) else OfTransformer(config, ways, prompt)


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

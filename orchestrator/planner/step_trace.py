"""The operators, messages and memory of one rank in one optimizer step, as plain values. Torch-free.

`orchestrator/planner/trace` creates them by running the engine's own step on tensors without memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["forward", "backward", "optimizer"]
"""Recomputation belongs to the backward pass. Later sums of gradients, norms and clipping belong to the optimizer."""
Kind = Literal["matmul", "attention", "elementwise", "copy", "optimizer"]
"""matmul: matrix products, grouped ones of experts included. attention: a fused kernel, forward or backward.
elementwise: operators bound by memory, so also reductions, norms, softmax and gathers by index. copy: operators that
only change place or dtype. optimizer: a fused or foreach update."""
Message = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "receive"
]
Axis = Literal["data", "tp", "cp", "pp", "expert", "expert_data", "world", "other"]
"""The process group of `orchestrator/parallel/mesh.py` that a collective runs over."""
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "communication", "other")
"""The use of a byte of memory. weights: this rank's parameters, without their casts to the compute dtype.
gradients: `.grad` and flat buckets. optimizer: its slots, and a moving average of the weights. activations: results of
the forward pass that the backward pass reads, and temporary results of operators. communication: gathered parameters,
and buffers of collectives and pipelines. other: batches, counters, buffers of the model."""


@dataclass(frozen=True)
class Operation:
    """One operator that runs on this rank.

    Attributes:
        name: the ATen operator, as `aten.addmm`.
        flops: floating-point operations, two for a multiply-add; 0 for operators bound by memory.
        read, written: bytes of its tensors.
        shapes: shapes of its tensor arguments, in order; for a matmul ([..., m, k], [k, n]) or as the operator takes
            them.
        dtype: dtype of its first floating-point tensor: "float32", "bfloat16", ...
        stage, micro_batch: the pipeline stage and micro-batch that it belongs to; None outside of both passes.
        recomputed: whether it repeats an operator of the forward pass in the backward pass.
    """

    kind: Kind
    name: str
    flops: float
    read: int
    written: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    phase: Phase
    stage: int | None = None
    micro_batch: int | None = None
    recomputed: bool = False


@dataclass(frozen=True)
class Collective:
    """One message that this rank takes part in.

    Attributes:
        bytes: bytes of the whole tensor that is reduced or gathered, or bytes that this rank sends or receives.
        size: ranks in the group.
        asynchronous: whether the rank continues; the `Wait` with the same `number` says where it needs the result.
        number: index among the messages of this step.
        peer: the other rank of a send or receive; None for collectives.
    """

    message: Message
    bytes: int
    size: int
    axis: Axis
    asynchronous: bool
    number: int
    phase: Phase
    dtype: str = "float32"
    stage: int | None = None
    micro_batch: int | None = None
    peer: int | None = None


@dataclass(frozen=True)
class Wait:
    """The rank waits for the asynchronous message `number`."""

    number: int
    phase: Phase


Event = Operation | Collective | Wait


Pass = tuple[Phase, int | None, int | None]
"""A pass of a step: phase, pipeline stage and micro-batch; the last two are None outside of both passes."""
OperatorPeak = tuple[Pass, int, tuple[int, ...]]
"""The peak around one operator: its pass, the bytes, and the bytes by category."""


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors that this rank holds on its device.

    Attributes:
        peak: largest number of bytes in a step, after the optimizer has created its state.
        at_peak: bytes by category at that time, in the order of CATEGORIES; their sum is `peak`.
        steady: bytes between two steps, by category.
        phase, stage, micro_batch: the pass in which the peak occurs.
    """

    peak: int
    at_peak: dict[str, int]
    steady: dict[str, int]
    phase: Phase
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class StepTrace:
    """One rank's step: `events` in the order in which they run, for all micro-batches.

    Attributes:
        assumptions: assumptions about the data, one line each ("experts are equally loaded").
        saved: bytes that this rank copies to the host's memory for a commit.
        batch_bytes: bytes of one micro-batch of the step's input.
        operator_peaks: the peak of memory around each operator.
    """

    rank: int
    layout: dict[str, Any]
    events: tuple[Event, ...]
    memory: Memory
    assumptions: tuple[str, ...] = ()
    saved: int = 0
    batch_bytes: int = 0
    operator_peaks: tuple[OperatorPeak, ...] = dataclasses.field(default=(), repr=False)

    @property
    def operations(self) -> list[Operation]:
        """The operators among the events."""
        return [event for event in self.events if isinstance(event, Operation)]

    @property
    def collectives(self) -> list[Collective]:
        """The messages among the events."""
        return [event for event in self.events if isinstance(event, Collective)]

    def memory_json(self) -> dict[str, Any]:
        """The memory as plain data, for plan.json."""
        return {"rank": self.rank, **dataclasses.asdict(self.memory), "assumed": list(self.assumptions)}


@dataclass(frozen=True)
class NotTraced:
    """Why a rank of a layout could not be traced; its memory is predicted by the closed formula instead."""

    rank: int
    reason: str

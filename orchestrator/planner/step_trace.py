"""What one rank does in one optimiser step, operator by operator, and the memory that it takes: plain values.

`orchestrator/planner/trace` fills them by running the engine's own step on tensors without memory. The time of a step
is predicted from them. Torch-free.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["forward", "backward", "optimizer"]
"""What is recomputed is of the backward pass. Sums of gradients after it, norms and clipping are of the optimizer."""
Kind = Literal["matmul", "attention", "elementwise", "copy", "optimizer"]
"""matmul: products of matrices, grouped ones of experts too. attention: a fused kernel, forward or backward.
elementwise: also reductions, norms, softmax, gathers by index: what is bound by memory. copy: one that changes place or
type alone. optimizer: a fused or foreach update."""
Message = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "receive"
]
Axis = Literal["data", "tp", "cp", "pp", "expert", "expert_data", "world", "other"]
"""The process group of `orchestrator/parallel/mesh.py` that a collective runs over."""
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "communication", "other")
"""What a byte of a step is for. weights: parameters of this rank as it keeps them, their compute-dtype copies not.
gradients: `.grad` and flat buckets. optimizer: its slots, and a moving average of the weights. activations: what the
forward pass made and the backward pass still reads, with what an operator returns for a moment. communication: gathered
parameters, and buffers of collectives and pipelines. other: batches, counters, buffers of the model."""


@dataclass(frozen=True)
class Operation:
    """One operator that runs on this rank.

    Attributes:
        name: the ATen operator, as `aten.addmm`.
        flops: floating-point operations, two of a multiply-add; 0 of what is bound by memory.
        read, written: bytes of its tensors.
        shapes: of its tensor arguments, in order. Of a matmul: ([..., m, k], [k, n]) or as the operator takes them.
        dtype: of its first floating-point tensor: "float32", "bfloat16", ...
        stage, micro_batch: which pipeline stage and micro-batch it is of; None outside of both passes.
        recomputed: in the backward pass, run there for a second time.
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
        bytes: of the whole tensor: what is reduced or gathered in full, or what this rank sends or receives.
        size: ranks in the group.
        asynchronous: the rank goes on; the `Wait` with the same `number` says where it needs the result.
        number: of the messages of this step, in order.
        peer: the other rank of a send or receive, None of others.
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
    """The rank waits here for message `number`, which was asynchronous."""

    number: int
    phase: Phase


Event = Operation | Collective | Wait


Place = tuple[Phase, int | None, int | None]
"""A pass of a step: its phase, its pipeline stage and its micro-batch, None outside of both passes."""
Crest = tuple[Place, int, tuple[int, ...]]
"""The most bytes that are held around one operator: in which pass, how many, and by category."""


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors that this rank holds on its device.

    Attributes:
        peak: the most at any time of a step, once the optimiser has its state.
        at_peak: its parts then, by category, in the order of CATEGORIES; they sum to `peak`.
        steady: held between two steps, by category.
        phase, stage, micro_batch: when the peak is.
    """

    peak: int
    at_peak: dict[str, int]
    steady: dict[str, int]
    phase: Phase
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class StepTrace:
    """One rank's step: `events` in the order in which it runs them; of micro-batches without a pipeline all of them.

    Attributes:
        memory_curve: (number of events before it, bytes held) at each new level worth drawing, ascending.
        assumed: what depends on data and was assumed, one line each ("experts are equally loaded").
        saved: bytes that this rank copies to the host's memory for a commit.
        batch_bytes: of one micro-batch of what the step is given.
        crests: the memory of the step around each operator.
    """

    rank: int
    layout: dict[str, Any]
    events: tuple[Event, ...]
    memory: Memory
    memory_curve: tuple[tuple[int, int], ...] = ()
    assumed: tuple[str, ...] = ()
    saved: int = 0
    batch_bytes: int = 0
    crests: tuple[Crest, ...] = dataclasses.field(default=(), repr=False)

    @property
    def operations(self) -> list[Operation]:
        """The operators alone."""
        return [event for event in self.events if isinstance(event, Operation)]

    @property
    def collectives(self) -> list[Collective]:
        """The messages alone."""
        return [event for event in self.events if isinstance(event, Collective)]

    def memory_json(self) -> dict[str, Any]:
        """The memory as plain data, for plan.json."""
        return {"rank": self.rank, **dataclasses.asdict(self.memory), "assumed": list(self.assumed)}


@dataclass(frozen=True)
class NotTraced:
    """Why a rank of a layout could not be traced; its memory is predicted by the closed formula instead."""

    rank: int
    reason: str

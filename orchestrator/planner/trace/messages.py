"""The collectives of a traced rank: their kind, size and group, and where the rank waits for their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from orchestrator.parallel.mesh import Mesh
from orchestrator.planner.step_trace import Axis, Collective, Event, Message, Phase, Wait
from orchestrator.planner.trace.operators import bytes_of, dtype_of, tensors_in
from orchestrator.planner.trace.replaced import replaced

KINDS: dict[str, Message] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
}
"""Kinds of messages by the operator of `torch.ops.c10d`."""
ASYNCHRONOUS = ("all_reduce", "broadcast", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
                "reduce_scatter_tensor")  # fmt: skip
"""Functions of torch.distributed that may return work to wait for."""
AXES: tuple[Axis, ...] = ("tp", "cp", "pp", "data", "expert", "expert_data", "world")


class Messages:
    """Turns collectives into numbered events, and names the axis of the mesh that each group belongs to.

    Attributes:
        mesh: the groups of the traced engine; None before it is built.
        count: number of messages so far.
    """

    def __init__(self, on_cpu: bool) -> None:
        """`on_cpu`: whether gloo runs the collectives; it knows that a message arrived only after a wait."""
        self.mesh: Mesh | None = None
        self.count = 0
        self._on_cpu = on_cpu
        # Tensors of each message of the current call that returns work; None outside of such calls.
        self._sent: list[list[Tensor]] | None = None
        # Axis and number of ranks by the name of a group.
        self._sizes: dict[str, tuple[Axis, int]] = {}

    def record(
        self, func: Any, args: Sequence[Any], phase: Phase, stage: int | None, micro_batch: int | None
    ) -> Collective | None:
        """Return the message of an operator of c10d; None for a barrier.

        Args:
            func: the operator.
            args: its arguments.
            phase: of the step.
            stage: that runs now; None outside of passes.
            micro_batch: that runs now; None outside of passes.
        """
        name = func.overloadpacket.__name__
        if name not in KINDS:
            return None
        tensors = tensors_in(args)
        # An all-reduce may have several tensors. Where parts are gathered or scattered, the largest tensor is whole.
        size = max(bytes_of([t]) for t in tensors) if KINDS[name] != "all_reduce" else bytes_of(tensors)
        group = next(dist.ProcessGroup.unbox(a) for a in args if _is_group(a))
        axis, ranks = self._axis(group)
        names = [argument.name for argument in func._schema.arguments]
        position = names.index("async_op") if "async_op" in names else len(args)
        peer = None
        if KINDS[name] in ("send", "receive"):
            peer = next(a for a in args if isinstance(a, int) and not isinstance(a, bool))
        self.count += 1
        if self._sent is not None:
            self._sent.append(tensors)
        return Collective(
            message=KINDS[name],
            bytes=size,
            size=ranks,
            axis=axis,
            asynchronous=bool(args[position]) if position < len(args) else True,
            number=self.count - 1,
            phase=phase,
            dtype=dtype_of(tensors),
            stage=stage,
            micro_batch=micro_batch,
            peer=peer,
        )

    def copied(self, func: Any, tensors: Sequence[Tensor]) -> int:
        """Return the bytes that the operator copies: gloo's reduce-scatter reduces a copy of the whole tensor.

        Args:
            func: the operator.
            tensors: its arguments.
        """
        name = func.overloadpacket.__name__
        if not self._on_cpu or KINDS.get(name) != "reduce_scatter":
            return 0
        return max(bytes_of([tensor]) for tensor in tensors)

    def _axis(self, group: dist.ProcessGroup) -> tuple[Axis, int]:
        if group.group_name not in self._sizes:
            group_axis: Axis = "other"
            for axis in AXES:
                handle = getattr(self.mesh, axis).handle if self.mesh else None
                if handle is not None and handle.group_name == group.group_name:
                    group_axis = axis
                    break
            self._sizes[group.group_name] = (group_axis, group.size())
        return self._sizes[group.group_name]

    @contextlib.contextmanager
    def record_waits(self, record: Callable[[Event], None], phase: Callable[[], Phase]) -> Iterator[None]:
        """Within the context, call `record` with a Wait when the rank waits for an asynchronous message.

        Args:
            record: gets each event.
            phase: returns the phase of the step.
        """

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                before = self.count
                self._sent = []
                result = function(*args, **kwargs)
                sent = self._sent
                self._sent = None
                if isinstance(result, list):  # a batch of sends and receives
                    return [
                        recorded(work, before + number, sent[number : number + 1])
                        for number, work in enumerate(result)
                    ]
                return None if result is None else recorded(result, self.count - 1, sent)

            return call

        def recorded(work: Any, number: int, sent: list[list[Tensor]]) -> _RecordedWork:
            return _RecordedWork(
                work=work,
                number=number,
                record=record,
                phase=phase,
                sent=sent,
                has_arrived=not self._on_cpu,
            )

        with contextlib.ExitStack() as stack:
            for name in ASYNCHRONOUS:
                stack.enter_context(replaced(dist, name, wrapped(getattr(dist, name))))
            stack.enter_context(replaced(schedules, "_batch_p2p", wrapped(schedules._batch_p2p)))
            yield


class _RecordedWork:
    """Work of torch.distributed whose first wait is recorded. Like real work it keeps its tensors alive."""

    def __init__(
        self,
        work: Any,
        number: int,
        record: Callable[[Event], None],
        phase: Callable[[], Phase],
        sent: list[list[Tensor]],
        has_arrived: bool,
    ) -> None:
        self._work = work
        self._number = number
        self._record = record
        self._phase = phase
        self._sent = sent
        self._has_arrived = has_arrived
        self._waited = False

    def wait(self, *args: Any) -> Any:
        """Wait for the message."""
        if not self._waited:
            self._waited = True
            self._record(Wait(self._number, self._phase()))
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        """Return whether the message is known to have arrived."""
        return self._waited or self._has_arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _is_group(argument: Any) -> bool:
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        dist.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return False
    return True

"""The messages of a rank: which collective, over which group, and where its result is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from orchestrator.parallel.mesh import Mesh
from orchestrator.planner.step_trace import Axis, Collective, Event, Message, Phase, Wait
from orchestrator.planner.trace.operators import bytes_of, dtype_of, tensors_in

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
"""Operators of `torch.ops.c10d`; in those that gather or scatter the whole tensor is the larger one."""
ASYNCHRONOUS = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
                "reduce_scatter_tensor")  # fmt: skip
"""Functions of torch.distributed that may return work to wait for."""
AXES: tuple[Axis, ...] = ("tp", "cp", "pp", "data", "expert", "expert_data", "world")


class Messages:
    """Numbers the messages of a step, and names the axis of each group of `mesh`. Of gloo, `on_cpu`, a message is known
    to have arrived only once it was waited for."""

    def __init__(self, on_cpu: bool) -> None:
        self.mesh: Mesh | None = None
        self._on_cpu = on_cpu
        self.made = 0
        self._sent: list[list[Tensor]] | None = None  # within a call that returns work
        self._sizes: dict[str, tuple[Axis, int]] = {}

    def of(
        self, func: Any, args: Sequence[Any], phase: Phase, stage: int | None, micro_batch: int | None
    ) -> Collective | None:
        """The message of an operator of c10d; None for a barrier."""
        name = func.overloadpacket.__name__
        if name not in KINDS:
            return None
        tensors = tensors_in(args)
        size = max(bytes_of([t]) for t in tensors) if KINDS[name] != "all_reduce" else bytes_of(tensors)
        group = next(dist.ProcessGroup.unbox(a) for a in args if _is_group(a))
        axis, ranks = self._axis(group)
        names = [argument.name for argument in func._schema.arguments]
        at = names.index("async_op") if "async_op" in names else len(args)
        peer = None
        if KINDS[name] in ("send", "receive"):
            peer = next(a for a in args if isinstance(a, int) and not isinstance(a, bool))
        self.made += 1
        if self._sent is not None:
            self._sent.append(tensors)
        return Collective(
            KINDS[name],
            size,
            ranks,
            axis,
            bool(args[at]) if at < len(args) else True,
            self.made - 1,
            phase,
            dtype_of(tensors),
            stage,
            micro_batch,
            peer,
        )

    def copied(self, func: Any, given: Sequence[Tensor]) -> int:
        """Bytes that the operator itself copies of what it is `given`: gloo reduces a copy of all that it scatters."""
        name = func.overloadpacket.__name__
        if not self._on_cpu or KINDS.get(name) != "reduce_scatter":
            return 0
        return max(bytes_of([tensor]) for tensor in given)

    def _axis(self, group: dist.ProcessGroup) -> tuple[Axis, int]:
        if group.group_name not in self._sizes:
            found: Axis = "other"
            for axis in AXES:
                handle = getattr(self.mesh, axis).handle if self.mesh else None
                if handle is not None and handle.group_name == group.group_name:
                    found = axis
                    break
            self._sizes[group.group_name] = (found, group.size())
        return self._sizes[group.group_name]

    @contextlib.contextmanager
    def waits_told(self, tell: Callable[[Event], None], phase: Callable[[], Phase]) -> Iterator[None]:
        """Within it, `tell` gets a Wait where the result of an asynchronous message is waited for."""

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._sent, before = [], self.made
                found = function(*args, **kwargs)
                sent, self._sent = self._sent, None
                if isinstance(found, list):
                    return [
                        _Told(work, before + number, tell, phase, sent[number : number + 1], not self._on_cpu)
                        for number, work in enumerate(found)
                    ]
                if found is None:
                    return None
                return _Told(found, self.made - 1, tell, phase, sent, not self._on_cpu)

            return call

        with contextlib.ExitStack() as stack:
            for name in ASYNCHRONOUS:
                stack.enter_context(patch.object(dist, name, wrapped(getattr(dist, name))))
            stack.enter_context(patch.object(schedules, "_batch_p2p", wrapped(schedules._batch_p2p)))
            yield


class _Told:
    """Work of torch.distributed; its first wait is told. As real work it holds its tensors to its end."""

    def __init__(
        self,
        work: Any,
        number: int,
        tell: Callable[[Event], None],
        phase: Callable[[], Phase],
        sent: list[list[Tensor]],
        has_arrived: bool,
    ) -> None:
        self._sent, self._has_arrived = sent, has_arrived
        self._work, self._number, self._tell, self._phase = work, number, tell, phase
        self._waited = False

    def wait(self, *given: Any) -> Any:
        """Wait for it."""
        if not self._waited:
            self._waited = True
            self._tell(Wait(self._number, self._phase()))
        return self._work.wait(*given)

    def is_completed(self) -> bool:
        """Whether it is known to have arrived."""
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

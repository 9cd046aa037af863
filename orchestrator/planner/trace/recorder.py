"""The recorder of a step: every operator and message of a rank in order, and the memory after each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.planner.step_trace import CATEGORIES, Crest, Event, Operation, Phase
from orchestrator.planner.trace.messages import Messages
from orchestrator.planner.trace.operators import (
    bytes_of,
    dtype_of,
    flops_of,
    is_free,
    kind_of,
    tensors_in,
    written_arguments,
)


class HeldBytes:
    """Follows storages from the operator that makes them to their end, by weak references.

    What is counted is the memory that tensors name: several views of one storage count once. What a kernel takes for a
    moment within itself, what an allocator rounds up or keeps, and what libraries hold is not.

    Attributes:
        peak, at_peak: the most since `begin_peak`, and its parts.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.now)
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self.total, dict(self.now)

    def add(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's storage from now on, if it is not counted yet."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        key = storage._cdata
        self._known[key] = (weakref.ref(storage, lambda _: self._end(key)), 0, category)
        self._set(key, storage.nbytes(), category)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """A counted storage has another size: sharded parameters are gathered into one, and freed, so."""
        if storage._cdata in self._known:
            self._set(storage._cdata, storage.nbytes(), category)

    def move(self, tensors: Iterable[Tensor], category: str) -> None:
        """These tensors are for something else than was thought; a peak that stands now is of the new categories."""
        is_at_peak = self.total == self.peak
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._known:
                self._set(key, self._known[key][1], category)
            else:
                self.add(tensor, category)
        if is_at_peak:
            self.at_peak = dict(self.now)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are elsewhere, and count no more."""
        for tensor in tensors:
            self.add(tensor, "other")
            key = tensor.untyped_storage()._cdata
            self._set(key, 0, self._known[key][2])

    def pass_by(self, size: int, category: str) -> None:
        """Count so many bytes that are held only for as long as an operator takes."""
        if self.total + size > self.peak:
            self.peak, self.at_peak = self.total + size, dict(self.now)
            self.at_peak[category] += size

    def category(self, tensor: Tensor) -> str:
        """What the tensor is for; empty if it is not counted."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        return found[2] if found else ""

    def _set(self, key: int, size: int, category: str) -> None:
        reference, before, was = self._known[key]
        self._known[key] = (reference, size, category)
        self.now[was] -= before
        self.now[category] += size
        self.total += size - before
        self._look()

    def _end(self, key: int) -> None:
        _, size, category = self._known.pop(key)
        self.now[category] -= size
        self.total -= size

    def _look(self) -> None:
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.now)


CURVE_STEP = 1 / 256
"""Share of the peak by which memory must have changed for another point of its curve."""


class Recorder(TorchDispatchMode):
    """Counts the memory of all tensors on a device while it is entered, and records events while `events` is a list.

    Attributes:
        place: (stage, micro-batch) of what runs now, None outside of both passes.
        is_update: whether both passes are over.
        updates_elsewhere: whether what the update makes is in host memory, and does not count.
        is_backward: whether a pipeline's backward pass runs, parts of it outside of autograd.
        steps_in: what memory a tensor made now is for, by default that of the phase.
    """

    def __init__(
        self,
        device: torch.device,
        stand_in: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None,
        messages: Messages | None = None,
        run: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None,
    ) -> None:
        """`stand_in` gives results of operators that need values, where tensors have none; `run` runs the others."""
        super().__init__()
        self.held = HeldBytes()
        self.events: list[Event] | None = None
        self.place: tuple[int | None, int | None] = (None, None)
        self.is_update = self.is_backward = self.updates_elsewhere = False
        self.crests: list[Crest] = []
        self.curve: list[tuple[int, int]] = []
        self.steady: dict[str, int] = {}
        self.micro_batch = -1
        self.in_pipeline: int | None = None
        self._device, self._stand_in, self._messages = device, stand_in, messages
        self._run = run or _run

    def __enter__(self) -> Recorder:
        """Begin to record; whole parameters are gathered into storages that are resized."""
        inner, held, entered = torch.UntypedStorage.resize_, self.held, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = inner(storage, size)
            held.resized(storage, "communication")
            entered.look()
            return found

        self._patched = patch.object(torch.UntypedStorage, "resize_", resize)
        self._patched.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patched.stop()

    def begin(self) -> None:
        """Look for the peak from here on."""
        self.crests.clear()
        self.curve.clear()
        self.held.begin_peak()

    @property
    def peak(self) -> Crest:
        """The most that is held since `begin`."""
        return max(self.crests, key=lambda crest: crest[1])

    @property
    def phase(self) -> Phase:
        """The phase of the step."""
        if self.is_update:
            return "optimizer"
        inside = self.is_backward or torch._C._current_graph_task_id() != -1
        return "backward" if inside else "forward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, then count and record it."""
        if func is torch.ops.prim.device.default:
            return _device_of(args[0])
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again with the tensors within
        out = None if self._stand_in is None else self._stand_in(func, args, kwargs)
        if isinstance(out, bool | int | float):
            return out
        out = self._run(func, args, kwargs) if out is None else out
        namespace = func.namespace
        if namespace == "prim":
            return out
        made = tensors_in(out)
        given = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        self._count(made, given, namespace, func)
        if self.events is not None and namespace == "c10d" and self._messages is not None:
            stage, micro = self.place
            found = self._messages.of(func, args, self.phase, stage, micro)
            if found is not None:
                self.events.append(found)
        elif self.events is not None and namespace != "c10d":
            self._record(func, args, kwargs, out, made, given)
        return out

    def _count(self, made: list[Tensor], given: list[Tensor], namespace: str, func: Any) -> None:
        if self.is_update and self.updates_elsewhere and namespace != "c10d":
            return
        category = "optimizer" if self.is_update else "activations"
        if self.place == (None, None) and not self.is_update and self.phase == "forward":
            category = "other"
        if namespace == "fsdp":
            category = "communication"
        for tensor in [*made, *given]:
            if _device_of(tensor) == self._device:
                self.held.add(tensor, category)
        if namespace == "c10d":
            name = func._schema.name
            if "recv" in name:
                self.held.move([t for t in given if _device_of(t) == self._device], "communication")
            if self._messages is not None:
                self.held.pass_by(self._messages.copied(func, given), "communication")
        self.look()

    def look(self) -> None:
        """Take note of the most since the last look, and of a new point of the curve."""
        held = self.held
        self.crests.append(((self.phase, *self.place), held.peak, tuple(held.at_peak.values())))
        held.begin_peak()
        if self.events is not None:
            now, last = self.held.total, self.curve[-1][1] if self.curve else -1
            if last < 0 or abs(now - last) > CURVE_STEP * max(self.held.peak, 1):
                self.curve.append((len(self.events), now))

    def _record(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        made: list[Tensor],
        given: list[Tensor],
    ) -> None:
        if is_free(func):
            return
        written = [*made, *written_arguments(func, args, kwargs)]
        name = func.overloadpacket.__name__
        phase = self.phase
        stage, micro = self.place
        assert self.events is not None
        self.events.append(
            Operation(
                kind_of(name, phase == "optimizer"),
                f"{func.namespace}.{name}",
                flops_of(func, name, args, kwargs, out),
                bytes_of(given),
                bytes_of(written),
                tuple(tuple(t.shape) for t in given[:6]),
                dtype_of(given or made),
                phase,
                stage,
                micro,
                phase == "backward" and torch.is_grad_enabled(),
            )
        )


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _device_of(tensor: Tensor) -> torch.device:
    """Its device; a fake one says it at once, not by an operator."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device

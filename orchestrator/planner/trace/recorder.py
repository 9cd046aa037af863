"""The recorder of a step: every operator and message of a rank in order, and the memory after each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.planner.step_trace import CATEGORIES, Event, Operation, OperatorPeak, Phase
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
from orchestrator.planner.trace.replaced import replaced


class LiveBytes:
    """Counts the bytes of live storages, from the operator that creates each to its end, by weak references.

    Several views of one storage count once. Workspace within a kernel, memory that an allocator rounds up or caches,
    and memory of libraries are not counted.

    Attributes:
        now: bytes by category.
        total: their sum.
        peak: the largest total since `begin_peak`.
        at_peak: bytes by category at that moment.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak = 0
        self.at_peak = dict(self.now)
        # Reference, bytes and category of each storage.
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.total
        self.at_peak = dict(self.now)

    def add(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's storage from now on, if it is not counted yet.

        Args:
            tensor: the tensor.
            category: one of CATEGORIES.
        """
        if tensor.layout is not torch.strided:
            return  # a sparse tensor has no storage of its own: its indices and values are counted
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        # The address of the storage's C++ object: Python may have several wrappers of one storage.
        key = storage._cdata
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), 0, category)
        self._set(key, storage.nbytes(), category)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a storage's new size. FSDP2 gathers parameters into a storage that it resizes, and frees them so.

        Args:
            storage: the storage.
            category: one of CATEGORIES.
        """
        if storage._cdata in self._storages:
            self._set(storage._cdata, storage.nbytes(), category)

    def move(self, tensors: Iterable[Tensor], category: str) -> None:
        """Assign tensors to another category; if the peak is now, it gets the new categories too.

        Args:
            tensors: the tensors.
            category: one of CATEGORIES.
        """
        is_at_peak = self.total == self.peak
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                self._set(key, self._storages[key][1], category)
            else:
                self.add(tensor, category)
        if is_at_peak:
            self.at_peak = dict(self.now)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Stop to count these tensors: they are in other memory."""
        for tensor in tensors:
            self.add(tensor, "other")
            key = tensor.untyped_storage()._cdata
            self._set(key, 0, self._storages[key][2])

    def count_temporary(self, size: int, category: str) -> None:
        """Count `size` bytes that an operator holds only while it runs.

        Args:
            size: bytes.
            category: one of CATEGORIES.
        """
        if self.total + size > self.peak:
            self.peak, self.at_peak = self.total + size, dict(self.now)
            self.at_peak[category] += size

    def category(self, tensor: Tensor) -> str:
        """Return the tensor's category; empty if it is not counted."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry[2] if entry else ""

    def _set(self, key: int, size: int, category: str) -> None:
        reference, old_size, old_category = self._storages[key]
        self._storages[key] = (reference, size, category)
        self.now[old_category] -= old_size
        self.now[category] += size
        self.total += size - old_size
        self._update_peak()

    def _forget(self, key: int) -> None:
        _, size, category = self._storages.pop(key)
        self.now[category] -= size
        self.total -= size

    def _update_peak(self) -> None:
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = dict(self.now)


class Recorder(TorchDispatchMode):
    """Counts the memory of all tensors on a device while it is entered, and records events while `events` is a list.

    Attributes:
        live: the bytes of live tensors.
        events: operators, messages and waits in order; None while nothing is recorded.
        current_pass: (stage, micro-batch) that runs now; (None, None) outside of forward and backward passes.
        is_update: whether the step is in its update, after all passes.
        updates_on_host: whether tensors of the update are in host memory, which is not counted.
        is_backward: whether a pipeline's backward pass runs; parts of it are outside of autograd.
        operator_peaks: peaks between two operators, each with its phase and place.
        steady: bytes by category between two steps.
        micro_batch: micro-batch that runs now, without a pipeline.
        in_pipeline: stage that runs now, within a pipeline.
    """

    def __init__(
        self,
        device: torch.device,
        stand_in: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None,
        messages: Messages | None = None,
        run: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None,
    ) -> None:
        """Create a recorder.

        Args:
            device: the device whose tensors count.
            stand_in: returns the result of an operator that needs values; None for an operator that torch can run.
            messages: turns collectives into events.
            run: runs the other operators.
        """
        super().__init__()
        self.live = LiveBytes()
        self.events: list[Event] | None = None
        self.current_pass: tuple[int | None, int | None] = (None, None)
        self.is_update = False
        self.is_backward = False
        self.updates_on_host = False
        self.operator_peaks: list[OperatorPeak] = []
        self.steady: dict[str, int] = {}
        self.micro_batch = -1
        self.in_pipeline: int | None = None
        self._device = device
        self._stand_in = stand_in
        self._messages = messages
        self._run = run or _run

    def __enter__(self) -> Recorder:
        """Begin to record. Resizes of storages are no operators, so they are recorded by replacing the method."""
        inner = torch.UntypedStorage.resize_
        live = self.live
        recorder = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = inner(storage, size)
            live.resized(storage, "communication")
            recorder.note_peak()
            return result

        self._resizes = replaced(torch.UntypedStorage, "resize_", resize)
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(None, None, None)

    def begin(self) -> None:
        """Look for the peak from here on."""
        self.operator_peaks.clear()
        self.live.begin_peak()

    @property
    def peak(self) -> OperatorPeak:
        """The largest crest since `begin`."""
        return max(self.operator_peaks, key=lambda crest: crest[1])

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
            return NotImplemented  # DTensor then calls the operator on its local tensors
        out = None if self._stand_in is None else self._stand_in(func, args, kwargs)
        if isinstance(out, bool | int | float):
            return out
        out = self._run(func, args, kwargs) if out is None else out
        namespace = func.namespace
        if namespace == "prim":
            return out
        results = tensors_in(out)
        arguments = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        self._count(results, arguments, namespace, func)
        if self.events is not None and namespace == "c10d" and self._messages is not None:
            stage, micro = self.current_pass
            message = self._messages.record(func, args, self.phase, stage, micro)
            if message is not None:
                self.events.append(message)
        elif self.events is not None and namespace != "c10d":
            self._record(func, args, kwargs=kwargs, out=out, results=results, arguments=arguments)
        return out

    def _count(self, results: list[Tensor], arguments: list[Tensor], namespace: str, func: Any) -> None:
        if self.is_update and self.updates_on_host and namespace != "c10d":
            return
        category = "optimizer" if self.is_update else "activations"
        if self.current_pass == (None, None) and not self.is_update and self.phase == "forward":
            category = "other"
        if namespace == "fsdp":
            category = "communication"
        # Arguments too: tensors from before the recorder was entered count from the first operator that reads them.
        for tensor in [*results, *arguments]:
            if _device_of(tensor) == self._device:
                self.live.add(tensor, category)
        if namespace == "c10d":
            name = func._schema.name
            if "recv" in name:
                self.live.move([t for t in arguments if _device_of(t) == self._device], "communication")
            if self._messages is not None:
                self.live.count_temporary(self._messages.copied(func, arguments), "communication")
        self.note_peak()

    def note_peak(self) -> None:
        """Note the peak since the last call."""
        live = self.live
        self.operator_peaks.append(
            ((self.phase, *self.current_pass), live.peak, tuple(live.at_peak.values()))
        )
        live.begin_peak()

    def _record(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        results: list[Tensor],
        arguments: list[Tensor],
    ) -> None:
        if is_free(func):
            return
        written = [*results, *written_arguments(func, args, kwargs)]
        name = func.overloadpacket.__name__
        phase = self.phase
        # Below, `recomputed`: checkpointing runs the forward pass again inside the backward pass, with gradients on.
        stage, micro = self.current_pass
        assert self.events is not None
        self.events.append(
            Operation(
                kind=kind_of(name, phase == "optimizer"),
                name=f"{func.namespace}.{name}",
                flops=flops_of(func, name, args, kwargs, out),
                read=bytes_of(arguments),
                written=bytes_of(written),
                shapes=tuple(tuple(t.shape) for t in arguments[:6]),
                dtype=dtype_of(arguments or results),
                phase=phase,
                stage=stage,
                micro_batch=micro,
                recomputed=phase == "backward" and torch.is_grad_enabled(),
            )
        )


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _device_of(tensor: Tensor) -> torch.device:
    """Return the tensor's device; `fake_device` avoids the operator that `device` runs on a fake tensor."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device

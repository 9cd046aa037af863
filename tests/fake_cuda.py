"""A rank's step on CUDA tensors that have no memory, in a group that sends nothing: for mistakes that show without a
device, and for how often the host waits for one.

FakeTensorMode refuses operators whose tensors are on two devices and follows types; streams and events are stubs. Where
torch was built without CUDA, `load` must come before torch is imported: `fake_cuda_rank` is such a program.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.bias
from torch import _meta_registrations
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from orchestrator.parallel import block_maxima, fsdp, losses

DEVICE = torch.device("cuda", 0)
COUNTS_ROWS = ("nonzero", "masked_select", "unique_consecutive", "_unique2")
"""Operators whose result is as large as their data say."""


class Waits(TorchDispatchMode):
    """Answers what the host asks of a tensor, and notes where it has to wait for the device: `places`; which operators
    of `attention` there were; and which groups sent something, by name, and on which device: `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.attention: set[str] = set()
        self.sent: set[tuple[str, str]] = set()

    def note(self) -> None:
        """The host waits now."""
        ours = [
            f
            for f in traceback.extract_stack()
            if "/orchestrator/" in f.filename or "/workloads/" in f.filename
        ]
        self.places.append(f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].name}" if ours else "backward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or answer in its place."""
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name, given = (
            func.overloadpacket.__name__,
            [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)],
        )
        on_device = any(t.is_cuda for t in given)
        if func.namespace == "c10d":
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            self.sent |= {(dist.ProcessGroup.unbox(group).group_name, t.device.type) for t in given}
        if "attention" in name or "attn" in name:
            self.attention.add(name)
        if name == "_local_scalar_dense":
            if on_device:
                self.note()
            return value_of(args[0])
        if on_device and (
            name in COUNTS_ROWS or self._counts_bools(name, args) or self._repeats(name, kwargs)
        ):
            self.note()
        if name == "index" and self._counts_bools(name, args):
            (chosen,) = args[1]  # of which fake data say nothing: the first half is
            return args[0].flatten(0, chosen.dim() - 1)[: chosen.numel() // 2].clone()
        out = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and self._is_fetched(name, args, kwargs, out):
            self.note()
        return out

    @staticmethod
    def _is_fetched(name: str, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
        """Whether the host waits for the copy of a tensor of the device."""
        source = args[0] if name == "_to_copy" else args[1]
        queued = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        return source.is_cuda and out.device.type == "cpu" and not queued

    @staticmethod
    def _counts_bools(name: str, args: Any) -> bool:
        found = args[1] if name in ("index", "index_put", "index_put_") else ()
        return any(isinstance(t, torch.Tensor) and t.dtype is torch.bool for t in found)

    @staticmethod
    def _repeats(name: str, kwargs: Any) -> bool:
        return name == "repeat_interleave" and kwargs.get("output_size") is None


def value_of(tensor: torch.Tensor) -> Any:
    """A number that a step can go on with: one of what is measured, none of what is counted."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    return 1.0 if tensor.is_floating_point() else False if tensor.dtype is torch.bool else 0


class Stub:
    """A stream or an event: all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = DEVICE, 0, 0

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> Stub:
        return Stub()

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _NoWeakReferences:
    """In place of the module weakref where torch looks for weak references, which fake tensors have of each other."""

    @staticmethod
    def getweakrefs(_: object) -> list[object]:
        return []


@contextlib.contextmanager
def fake_cuda(rank: int, world: int, rows: int = 0) -> Iterator[Waits]:
    """Within it, tensors on CUDA have no memory, and this process is a rank of a group in which nothing is sent.

    `rows` of tokens are routed to experts in a micro-batch, to each rank and to each expert as many.
    """
    waits = Waits()

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            waits.note()
        counts = tensor.is_cuda and tensor.dim() and not tensor.is_floating_point()
        one = rows // tensor.shape[-1] if counts else value_of(tensor)
        with unset_fake_temporarily():
            return torch.full(tuple(tensor.shape), one).tolist()

    def real_mesh(*given: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return made(*given, **keywords)

    def agreed(self: Any, stages: Any, *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def grouped(
        mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, *_: Any, **__: Any
    ) -> Any:
        """Torch's shapes without its check of types, which is that of the fast kernel: the other one takes fp32 too."""
        return _meta_registrations._create_grouped_mm_output_tensor(mat_a, mat_b, offs, None)

    def lower_right(queries: int, keys: int) -> torch.Tensor:
        """The tensor that the mask stands for, whose own class no fake tensor can be."""
        return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)

    made = fsdp._device_mesh
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("Stream", "Event", "current_stream", "default_stream", "stream", "device"):
                patch.setattr(torch.cuda, name, Stub)
            for name in (
                "set_device",
                "synchronize",
                "_lazy_init",
                "empty_cache",
                "reset_peak_memory_stats",
            ):
                patch.setattr(torch.cuda, name, lambda *_, **__: None)
            patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
            patch.setattr(torch.cuda, "device_count", lambda: 1)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "get_device_capability", lambda *_, **__: (9, 0))
            patch.setattr(torch.nn.attention.bias, "causal_lower_right", lower_right)
            patch.setattr(torch.cuda, "get_rng_state", lambda *_, **__: torch.zeros(1))
            patch.setattr(torch.cuda, "set_rng_state", lambda *_, **__: None)
            patch.setattr(_meta_registrations, "_meta_grouped_mm_common", grouped)
            patch.setattr(FakeTensor, "tolist", tolist)
            patch.setattr(fsdp, "_device_mesh", real_mesh)
            patch.setattr(schedules._PipelineSchedule, "_warmup_p2p", agreed)
            patch.setattr(block_maxima, "union", lambda numbers, groups, device: np.unique(numbers))
            patch.setattr(losses, "gather_json", lambda value: [value, ["loss", "count", "correct"]])
            patch.setattr(torch.utils, "weakref", _NoWeakReferences)
            with FakeTensorMode(allow_non_fake_inputs=True), waits:
                for name in (
                    "is_available",
                    "is_bf16_supported",
                ):  # which autocast asks, and the mode as it begins
                    patch.setattr(torch.cuda, name, lambda *_, **__: True)
                yield waits
    finally:
        dist.destroy_process_group()

"""The kind of an error, found where it was raised."""

from __future__ import annotations

import pytest

from cluster.workers.error_kind import cause_of
from cluster.workers.gang import Cause


class OutOfMemoryError(RuntimeError):
    """As torch and Ray name theirs."""


class OwnError(Exception):
    """An error that says what it is."""

    kind = "unstable"

    def __init__(self, text: str) -> None:
        self.step, self.position = 8, 56
        super().__init__(text)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "gpu_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), "memory"),
        (OutOfMemoryError("killed by the memory monitor"), "memory"),
        (OSError(28, "No space left on device"), "storage_full"),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.2]:1"), "peer_lost"),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970"), "peer_lost"),
        (RuntimeError("CUDA error: out of memory"), "gpu_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "gpu_memory"),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), "gpu_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu_memory"),
        (RuntimeError("CUDA error: an illegal memory access"), "gpu"),
        (PermissionError("AccessDenied"), "storage_refused"),
        (KeyError("x"), ""),
    ],
)
def test_a_library_s_error_is_known_by_its_text(error: Exception, kind: str) -> None:
    assert cause_of(error) == Cause("raised", name=type(error).__name__, kind=kind)  # type: ignore[arg-type]


def test_attributes_of_a_library_s_error_are_not_taken_for_ours() -> None:
    error = KeyError("x")
    error.kind, error.step, error.position = object(), object(), "somewhere"  # type: ignore[attr-defined]
    assert cause_of(error) == Cause("raised", name="KeyError")


def test_an_error_of_ours_says_itself_what_it_is() -> None:
    """Whatever its text, which may quote another's."""
    assert cause_of(OwnError("NCCL")) == Cause(
        "raised", name="OwnError", kind="unstable", step=8, position=56
    )

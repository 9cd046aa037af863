"""Classify the error that a rank raised. This happens once, in the rank; everything else decides by the kind.

Errors of this project have an attribute `kind` and, where it matters, `step`, `position` and `ranks`. Such attributes
of a library's error are ignored. Libraries (gloo, NCCL, CUDA, botocore) raise bare RuntimeErrors, which only their text
tells apart. Only this module matches such texts.
"""

from __future__ import annotations

import re

from cluster.workers.gang import Cause, ErrorKind

# Specific patterns come first: "CUDA error: out of memory" matches that of a broken GPU too.
OF_LIBRARIES: tuple[tuple[str, ErrorKind], ...] = (
    (
        r"ran out of memory|OutOfMemoryError.*CUDA|CUDA out of memory|(CUDA error|Cuda failure).*out of memory"
        r"|CU[A-Z]+_STATUS_ALLOC_FAILED",
        "gpu_memory",
    ),
    (r"memory monitor|OutOfMemoryError|MemoryError|Cannot allocate memory|DefaultCPUAllocator", "memory"),
    (r"No space left|ENOSPC|Errno 28", "storage_full"),
    (
        r"NoSuchBucket|AccessDenied|Forbidden|SlowDown|ServiceUnavailable|EndpointConnectionError",
        "storage_refused",
    ),
    (
        r"NCCL|DistNetworkError|Connection closed by peer|Connection reset|Connection refused|Broken pipe|Timed out",
        "peer_lost",
    ),
    (r"CUDA error|Xid|uncorrectable ECC", "gpu"),
)
"""Patterns for "Class: text" of a library's exception, each with a kind. The first match counts."""


OF_OURS: frozenset[ErrorKind] = frozenset({"input", "unstable", "corrupt_commit", "wrong_arithmetic"})
"""The kinds that errors of this project declare themselves."""


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a rank's end by an exception."""
    name = type(error).__name__
    kind = getattr(error, "kind", None)
    if isinstance(kind, str) and kind in OF_OURS:
        step = getattr(error, "step", -1)
        position = getattr(error, "position", -1)
        ranks = getattr(error, "ranks", ())
        return Cause("raised", name=name, kind=kind, step=step, position=position, ranks=ranks)
    text = f"{name}: {error}"
    library_kind: ErrorKind = next((kind for pattern, kind in OF_LIBRARIES if re.search(pattern, text)), "")
    return Cause("raised", name=name, kind=library_kind)

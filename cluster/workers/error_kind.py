"""What sort of error a rank raised, found once, where it was raised; everybody after decides by the kind.

Errors of this project say it themselves, by an attribute `kind` and, where it matters, `step` and `position`;
attributes of those names that a library's error may have are not read. Libraries (gloo, NCCL, CUDA, botocore) raise
bare RuntimeErrors whose text is all there is, so their texts are recognised here and nowhere else.
"""

from __future__ import annotations

import re

from cluster.workers.gang import Cause, ErrorKind

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
"""Pattern in "Class: text" of a library's exception, and its kind; the first that is found holds."""


OF_OURS: frozenset[ErrorKind] = frozenset({"input", "unstable", "corrupt_commit"})
"""The kinds that errors of this project say they are of."""


def cause_of(error: BaseException) -> Cause:
    """The cause of a rank's end by that exception."""
    name, kind = type(error).__name__, getattr(error, "kind", None)
    if isinstance(kind, str) and kind in OF_OURS:
        step, position = getattr(error, "step", -1), getattr(error, "position", -1)
        return Cause("raised", name=name, kind=kind, step=step, position=position)
    text = f"{name}: {error}"
    found: ErrorKind = next((kind for pattern, kind in OF_LIBRARIES if re.search(pattern, text)), "")
    return Cause("raised", name=name, kind=found)

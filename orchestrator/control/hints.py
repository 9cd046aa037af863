"""What a fault means and what to do about it, in a line: by how a rank ended, and for an exception by its words."""

from __future__ import annotations

import re

from cluster.workers.gang import Cause, End

KILLED = "look for who did: a scheduler, or a person"
EXITS: dict[int, tuple[str, str]] = {
    -9: ("the process was killed from outside", KILLED),
    -15: ("the process was told to end", KILLED),
    -7: ("shared memory ended", "enlarge /dev/shm"),
    -6: ("native code gave up", "the rank's log says why"),
    **dict.fromkeys((-11, -8, -4), ("native code crashed",
     "if it repeats, look at custom kernels and at the versions of torch and the driver")),
}  # fmt: skip
"""Cause and hint by exit code."""
ENDS: dict[End, tuple[str, str]] = {
    "starved": ("the machine's memory ended", "give workers more memory, or run fewer of them on a node"),
    "lost": ("the place is gone, or its whole node",
     "nothing to do: the run goes on with what is left, and grows again when there is room"),
    "silent": ("the process or its machine is frozen, or the network between is cut",
     "if it repeats on one node, take that node out"),
    "still": ("the ranks wait for each other", "if it repeats, see the stacks of the ranks with py-spy"),
    "unplaced": ("the cluster could not place the workers", "lower resources.workers.min, or add machines"),
}  # fmt: skip
"""Cause and hint of what has neither an exit code nor an exception."""
RAISED: tuple[tuple[str, str, str], ...] = (
    (r"ran out of memory|OutOfMemoryError.*CUDA|CUDA out of memory", "the GPU's memory ended",
     "raise parallel.zero or parallel.recompute, or lower parallel.micro_batch"),
    (r"memory monitor|OutOfMemoryError|MemoryError|Cannot allocate memory|DefaultCPUAllocator",
     "the machine's memory ended", "give workers more memory, or run fewer of them on a node"),
    (r"NonFinite|LossSpike", "training is unstable", "lower train.optimizer.lr, or look at the samples"),
    (r"No space left|ENOSPC|Errno 28", "storage is full", "make room, or keep fewer commits"),
    (r"NoSuchBucket|AccessDenied|Forbidden|SlowDown|ServiceUnavailable|EndpointConnectionError", "storage refuses",
     "check its address and the credentials"),
    (r"CorruptCommit", "a commit is damaged", "nothing to do: the one before is used"),
    (r"NCCL|Connection closed by peer|Connection reset|Broken pipe|Timed out", "a connection between ranks broke",
     "if it repeats, look at the network between their nodes"),
    (r"CUDA error|Xid|uncorrectable ECC", "a GPU failed", "if it repeats on one node, take that node out"),
    (r"InputError", "the job is wrong", "fix what the line says"),
)  # fmt: skip
"""Pattern in an exception's line, cause and hint; the first that is found holds."""


def explain(cause: Cause, why: str) -> str:
    """ "cause; hint" for how a rank ended and what was said of it, or that it is the program's own."""
    if cause.end in ENDS:
        return "; ".join(ENDS[cause.end])
    if cause.end == "exited":
        return "; ".join(EXITS.get(cause.code, ("the process ended by itself", "the rank's log says why")))
    for pattern, what, hint in RAISED:
        if re.search(pattern, why):
            return f"{what}; {hint}"
    return "the program raised it; its last line names the place"

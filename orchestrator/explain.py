"""What a fault means and what to do about it, in a line: from the words of exceptions, exit codes and Ray."""

from __future__ import annotations

import re

CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"ran out of memory|OutOfMemoryError.*CUDA|CUDA out of memory", "the GPU's memory ended",
     "raise parallel.zero or parallel.recompute, or lower parallel.micro_batch"),
    (r"the kernel ended it for want of memory|memory monitor|OutOfMemoryError", "the machine's memory ended",
     "give workers more memory, or run fewer of them on a node"),
    (r"exit code -9\b", "the process was killed from outside", "look for who did: a scheduler, or a person"),
    (r"exit code -15\b", "the process was told to end", "look for who did: a scheduler, or a person"),
    (r"exit code -(?:11|4|8)\b", "native code crashed",
     "if it repeats, look at custom kernels and at the versions of torch and the driver"),
    (r"exit code -7\b", "shared memory ended", "enlarge /dev/shm"),
    (r"exit code -6\b", "native code gave up", "the rank's log says why"),
    (r"node or its Ray worker is gone|no answer from|will be taken away", "the node is gone",
     "nothing to do: the run goes on with what is left, and grows again when there is room"),
    (r"no sign of life", "the process or its machine is frozen, or the network between is cut",
     "if it repeats on one node, take that node out"),
    (r"no step for", "the ranks wait for each other", "if it repeats, see the stacks of the ranks with py-spy"),
    (r"NonFinite|LossSpike", "training is unstable", "lower train.optimizer.lr, or look at the samples"),
    (r"No space left|ENOSPC|Errno 28", "storage is full", "make room, or keep fewer commits"),
    (r"NoSuchBucket|AccessDenied|Forbidden|SlowDown|ServiceUnavailable|EndpointConnectionError", "storage refuses",
     "check its address and the credentials"),
    (r"CorruptCommit", "a commit is damaged", "nothing to do: the one before is used"),
    (r"NCCL|Connection closed by peer|Connection reset|Broken pipe|Timed out", "a connection between ranks broke",
     "if it repeats, look at the network between their nodes"),
    (r"CUDA error|Xid|uncorrectable ECC", "a GPU failed", "if it repeats on one node, take that node out"),
    (r"no room for|do not start", "the cluster could not place the workers",
     "lower resources.workers.min, or add machines"),
    (r"InputError", "the job is wrong", "mend what the line says"),
)  # fmt: skip
"""Pattern, cause and mend; the first that is found holds."""


def explain(fault: str) -> str:
    """ "cause; mend" for a first fault, or that it is the program's own."""
    for pattern, cause, mend in CAUSES:
        if re.search(pattern, fault):
            return f"{cause}; {mend}"
    return "the program raised it; its last line names the place"

"""Explain a fault to people in one line: what it means and what to do. No decision depends on it."""

from __future__ import annotations

from cluster.workers.gang import Cause, End, ErrorKind

KILLED = "find out who did it: a scheduler, or a person"
EXITS: dict[int, tuple[str, str]] = {
    -9: ("the process was killed from outside", KILLED),
    -15: ("the process was asked to end", KILLED),
    -7: ("shared memory ended", "enlarge /dev/shm"),
    -6: ("native code gave up", "the rank's log says why"),
    **dict.fromkeys((-11, -8, -4), ("native code crashed",
     "if it repeats, look at custom kernels and at the versions of torch and the driver")),
}  # fmt: skip
"""The meaning of an exit code, negative for a signal, and a hint."""
ENDS: dict[End, tuple[str, str]] = {
    "starved": ("the machine's memory ended", "give workers more memory, or run fewer of them on a node"),
    "lost": ("the worker is gone, or its whole node",
     "nothing to do: the run continues with the workers that are left, and grows again when there is room"),
    "silent": ("the process or its machine is frozen, or the network between is cut",
     "if it repeats on one node, take that node out"),
    "still": ("the ranks wait for each other", "if the line names a rank, its log in logs/ shows what it did"),
    "unplaced": ("the cluster could not place the workers", "lower resources.workers.min, or add machines"),
}  # fmt: skip
"""The meaning of an end without an exit code or an exception, and a hint."""
ERRORS: dict[ErrorKind, tuple[str, str]] = {
    "gpu_memory": ("the GPU's memory ended",
     "raise parallel.zero or parallel.recompute, or lower parallel.micro_batch"),
    "memory": ("the machine's memory ended", "give workers more memory, or run fewer of them on a node"),
    "unstable": ("training is unstable", "lower train.optimizer.lr, or look at the samples"),
    "storage_full": ("storage is full", "make room, or keep fewer commits"),
    "storage_refused": ("storage refuses", "check its address and the credentials"),
    "corrupt_commit": ("a commit is damaged", "nothing to do: the one before is used"),
    "wrong_arithmetic": ("a machine computes wrongly",
     "its node is left out, and drained once nothing else runs there; the run goes back to the last verified commit; "
     "test the machine with `orchestrator doctor --burn-in`"),
    "peer_lost": ("a connection between ranks broke", "if it repeats, look at the network between their nodes"),
    "gpu": ("a GPU failed", "if it repeats on one node, take that node out"),
    "input": ("the job is wrong", "change what the line names"),
    "": ("the program raised it", "its last line says where"),
}  # fmt: skip
"""The meaning of an exception, by its kind, and a hint."""


def hint_for(cause: Cause) -> str:
    """Return the meaning of the end of a rank and what to do about it, as "meaning; hint"."""
    if cause.end in ENDS:
        return "; ".join(ENDS[cause.end])
    if cause.end == "exited":
        return "; ".join(EXITS.get(cause.code, ("the process ended by itself", "the rank's log says why")))
    return "; ".join(ERRORS[cause.kind])

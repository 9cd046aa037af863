"""Inject faults from outside the ranks: into a run's driver, its controller, its nodes and its storage.

They happen once the run has reached a step. For faults at an exact (rank, step) see `cluster.workers.injected_faults`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.local.local_cluster import LocalCluster, NodeSpec, add, find, remove
from cluster.workers.injected_faults import KINDS as RANK_KINDS

OUTER_KINDS = ("driver", "controller", "node", "drain", "flip", "torn", "outage", "full")
NEED_RANK = frozenset({"node", "drain"})
OUTAGE_SECONDS = 3.0
"""Seconds for which storage fails by default."""
MAX_FREE_BYTES = 1 << 30
"""A file system with more free bytes than this is not filled."""
DRAIN_SECONDS = 30.0
"""Seconds from a node's drain notice to its end."""


@dataclass(frozen=True)
class ExternalFault:
    """A fault of `kind` at `step`, counted from 1. For the kinds node and drain, `rank` chooses the node.

    - driver, controller: kill that process.
    - node: kill the node as a power failure would.
    - drain: announce to Ray that the node will be taken away, and take it after DRAIN_SECONDS.
    - flip: flip a bit of the newest commit while nothing runs, then give the command again.
    - torn: truncate a file of the newest commit while nothing runs, then give the command again.
    - outage: make storage fail for `seconds`.
    - full: leave storage without free space for `seconds`.
    """

    kind: str
    step: int
    rank: int = 0
    seconds: float = OUTAGE_SECONDS

    @classmethod
    def parse(cls, text: str) -> ExternalFault | None:
        """Parse KIND@STEP or KIND@RANK:STEP, optionally with =SECONDS. Returns None for the kinds of rank faults.

        Raises ValueError with a hint.
        """
        if text.partition("@")[0] in RANK_KINDS:
            return None
        match = re.fullmatch(rf"({'|'.join(OUTER_KINDS)})@(?:(\d+):)?(\d+)(?:=(\d+(?:\.\d+)?))?", text)
        if not match or (match[2] is not None) != (match[1] in NEED_RANK):
            kinds = ", ".join(f"{k}@RANK:STEP" if k in NEED_RANK else f"{k}@STEP" for k in OUTER_KINDS)
            ranks = ", ".join(f"{k}@RANK:STEP" for k in RANK_KINDS)
            raise ValueError(f"choose from {ranks}, {kinds}; outage and full may end in =SECONDS")
        return cls(match[1], int(match[3]), int(match[2] or 0), float(match[4] or OUTAGE_SECONDS))


def kill(pid: int) -> None:
    """Kill a process by SIGKILL, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants by SIGKILL."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def lose_node(cluster: LocalCluster, ip: str) -> None:
    """Kill the node at `ip` as a power failure would, and start another of the same size."""
    replacement = _same_size(cluster, ip)
    remove(find(cluster.name) or cluster, ip, abruptly=True)
    add(cluster, [replacement])


def drain_node(cluster: LocalCluster, ip: str) -> None:
    """Announce to the connected Ray that the node at `ip` will be taken away, and start another of the same size."""
    from cluster.workers import nodes

    nodes.drain(next(node.id for node in nodes.alive() if node.address == ip), DRAIN_SECONDS, "chaos")
    add(cluster, [_same_size(cluster, ip)])


def _same_size(cluster: LocalCluster, ip: str) -> NodeSpec:
    """Return the specification of a node with the same resources."""
    record = next(node for node in (find(cluster.name) or cluster).nodes if node["ip"] == ip)
    return NodeSpec("", "", cpus=record["cpus"], gpus=record["gpus"])


def newest_shard(checkpoints: Path) -> Path:
    """Return the largest file of the newest complete commit."""
    commits = sorted(p.parent for p in checkpoints.glob("step-*/manifest.json"))
    return max(
        (p for p in commits[-1].iterdir() if p.name != "manifest.json"), key=lambda p: p.stat().st_size
    )


def flip_bit(path: Path, seed: int = 0) -> None:
    """Flip one bit in the second half of a file."""
    offset = random.Random(seed).randrange(path.stat().st_size // 2, path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    """Cut off the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


@contextlib.contextmanager
def outage(checkpoints: Path) -> Any:
    """Make a folder unreadable and unwritable for the length of the block."""
    away = checkpoints.with_name("checkpoints-away")
    checkpoints.rename(away)
    checkpoints.write_text("storage is away")
    try:
        yield
    finally:
        checkpoints.unlink()
        away.rename(checkpoints)


@contextlib.contextmanager
def full(folder: Path) -> Any:
    """Fill the folder's file system for the length of the block. Raises ValueError if it is too large to fill."""
    if (free := shutil.disk_usage(folder).free) > MAX_FREE_BYTES:
        text = (
            f"{folder} is on a file system with {free / MAX_FREE_BYTES:.0f} GiB free, too large to be filled"
        )
        raise ValueError(text + "; put --runs on a small one, such as a tmpfs")
    ballast = folder / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2
        yield
    finally:
        ballast.unlink(missing_ok=True)


def wait_for(condition: Callable[[], Any], description: str, timeout: float) -> Any:
    """Wait until `condition()` is true, and return its value. Raises TimeoutError, which names the `description`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"waited {timeout:.0f} s for {description}")

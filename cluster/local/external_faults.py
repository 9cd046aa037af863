"""Faults from outside a run: of its processes, its nodes and its storage, at a step of it.

Faults of a rank at an exact (rank, step) are in `cluster.workers.injected_faults`; these come once the run has
reached a step.
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
OUTAGE = 3.0
"""Seconds that storage fails unless the fault says otherwise."""
LARGEST = 1 << 30
"""Bytes free above which a file system is not filled."""
DRAIN = 30.0
"""Seconds from the notice that a node gets to its end."""


@dataclass(frozen=True)
class ExternalFault:
    """`kind` at `step`, counted from 1; `rank` for what befalls the node of a rank.

    driver and controller are killed; node loses the power; drain tells Ray that the node will be taken away, and takes
    it after DRAIN seconds; flip turns a bit of the newest commit and torn cuts one of its files, both while nothing
    runs, and the command is given again; outage makes storage refuse for `seconds`, full leaves it without room.
    """

    kind: str
    step: int
    rank: int = 0
    seconds: float = OUTAGE

    @classmethod
    def parse(cls, text: str) -> ExternalFault | None:
        """The strike written as KIND@STEP or KIND@RANK:STEP, then =SECONDS; None if it is a rank's fault.

        Raises ValueError with a hint.
        """
        if text.partition("@")[0] in RANK_KINDS:
            return None
        found = re.fullmatch(rf"({'|'.join(OUTER_KINDS)})@(?:(\d+):)?(\d+)(?:=(\d+(?:\.\d+)?))?", text)
        if not found or (found[2] is not None) != (found[1] in NEED_RANK):
            kinds = ", ".join(f"{k}@RANK:STEP" if k in NEED_RANK else f"{k}@STEP" for k in OUTER_KINDS)
            ranks = ", ".join(f"{k}@RANK:STEP" for k in RANK_KINDS)
            raise ValueError(f"choose from {ranks}, {kinds}; outage and full may end in =SECONDS")
        return cls(found[1], int(found[3]), int(found[2] or 0), float(found[4] or OUTAGE))


def kill(pid: int) -> None:
    """SIGKILL, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def lose_node(cluster: LocalCluster, ip: str) -> None:
    """As a power failure would; another machine comes in its place."""
    spare = _like(cluster, ip)
    remove(find(cluster.name) or cluster, ip, abruptly=True)
    add(cluster, [spare])


def drain_node(cluster: LocalCluster, ip: str) -> None:
    """Tell Ray, to which this process is connected, that the node will be taken away; another comes in its place."""
    from cluster.workers import nodes

    nodes.drain(next(node.id for node in nodes.alive() if node.address == ip), DRAIN, "chaos")
    add(cluster, [_like(cluster, ip)])


def _like(cluster: LocalCluster, ip: str) -> NodeSpec:
    """A node as large as that one."""
    record = next(node for node in (find(cluster.name) or cluster).nodes if node["ip"] == ip)
    return NodeSpec("", "", cpus=record["cpus"], gpus=record["gpus"])


def newest_shard(checkpoints: Path) -> Path:
    """The largest file of the newest commit that is whole."""
    commits = sorted(p.parent for p in checkpoints.glob("step-*/manifest.json"))
    return max(
        (p for p in commits[-1].iterdir() if p.name != "manifest.json"), key=lambda p: p.stat().st_size
    )


def flip_bit(path: Path, seed: int = 0) -> None:
    """Turn one bit of a file."""
    place = random.Random(seed).randrange(path.stat().st_size // 2, path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def tear(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


@contextlib.contextmanager
def outage(checkpoints: Path) -> Any:
    """Nothing can be written to the folder, nor read from it."""
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
    """The file system of the folder has no room. Raises ValueError if it is too large to be filled."""
    if (free := shutil.disk_usage(folder).free) > LARGEST:
        text = f"{folder} is on a file system with {free / LARGEST:.0f} GiB free, which is too large to be filled"
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


def wait_for(seen: Callable[[], Any], what: str, timeout: float) -> Any:
    """The first true value of `seen`. Raises TimeoutError that says what was waited for."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := seen():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"waited {timeout:.0f} s for {what}")

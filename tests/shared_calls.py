"""What tests call in copies of a process with shared imports."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cluster.workers.worker_context import WorkerContext


def place(config: dict[str, Any], link: WorkerContext) -> list[str]:
    """Where a rank is, and two variables of its environment."""
    return [os.getcwd(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("HOME", "")]


def pid_and_module(name: str) -> tuple[int, bool]:
    """The process, and whether it has a module."""
    return os.getpid(), name in sys.modules


def clean_up_late(folder: str) -> None:
    """Tell that it has begun, and that it was interrupted."""
    try:
        Path(folder, "begins").write_text(str(os.getpid()))
        os.rename(Path(folder, "begins"), Path(folder, "begun"))
        time.sleep(60)
    finally:
        Path(folder, "cleaned").touch()


def die_once(folder: str) -> int:
    """End without a result the first time; how often it was called."""
    marks = Path(folder)
    marks.mkdir(exist_ok=True)
    (marks / str(os.getpid())).touch()
    if len(list(marks.iterdir())) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(list(marks.iterdir()))


class Odd(Exception):
    """One that pickle cannot make again, as of some libraries."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fail_oddly() -> None:
    """Raise it."""
    raise Odd("a", "b")

"""What ranks on a GPU run in these tests: entry points of a gang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from cluster.workers.worker_context import WorkerContext


def allocate(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Take memory of the device in a process that was forked; with `kills`, die with it."""
    began = time.monotonic()
    device = torch.device(config["device"])
    held = torch.ones(int(config["bytes"]) // 4, device=device)
    total = float(held.double().mean())
    context.report(1)
    if config.get("kills"):
        time.sleep(1.0)  # until the report has left
        os.kill(os.getpid(), signal.SIGKILL)
    return {"mean": total, "seconds": time.monotonic() - began}


def runs_out(config: dict[str, Any], context: WorkerContext) -> None:
    """Ask for more than the device has."""
    context.report(0)
    torch.empty(1 << 46, dtype=torch.uint8, device=config["device"])


def train(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train a task; its rows, and what the driver says is in use at the end."""
    from orchestrator.train.loop import main

    began = time.monotonic()
    main(config, context)
    rows = context.unsaved_rows()
    found: dict[str, Any] = {"rows": rows, "seconds": time.monotonic() - began}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"driver": total - free, "reserved": torch.cuda.max_memory_reserved()}
    return found

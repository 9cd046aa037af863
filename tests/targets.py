"""Entry points for gangs in tests: light, and importable in any process that has this folder on its path."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.workers.worker_context import WorkerContext

TIMEOUT = 60.0


def count(config: dict[str, Any], link: WorkerContext) -> dict[str, Any]:
    """Report so many steps, rank 0 with a row each; the result is the rank info and what it was given."""
    for step in range(1, config["steps"] + 1):
        link.report(step, {"step": step} if link.rank_info.rank == 0 else None)
    if link.store is not None:
        link.store.set("from", "rank 0")
    return {**dataclasses.asdict(link.rank_info), "config": config, "serves": link.store is not None}


def imports(config: dict[str, Any], link: WorkerContext) -> str:
    """Import modules between two steps, each of which takes a while."""
    link.report(1)
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for number in range(config["modules"]):
            Path(folder, f"slow_{number}.py").write_text("import time; time.sleep(0.3)")
            importlib.invalidate_caches()
            importlib.import_module(f"slow_{number}")
    return "imported"


def evaluates(config: dict[str, Any], link: WorkerContext) -> str:
    """Do so many batches of work between two steps, then nothing until asked to stop."""
    link.begin_work("evaluation of validation after step 1", "batches", config["batches"])
    for _ in range(config["batches"] - 1):
        time.sleep(0.1)
        link.progressed()
    time.sleep(0.3)
    link.end_work()
    return wait(config, link)


def gpus(config: dict[str, Any], link: WorkerContext) -> str:
    """Return the GPUs that this process may see."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def wait(config: dict[str, Any], link: WorkerContext) -> str:
    """Go on until asked to stop."""
    link.report(1)
    deadline = time.monotonic() + TIMEOUT
    while not link.stop_requested():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody asked for a stop")
        time.sleep(0.005)
    return "stopped"


def one_fails(config: dict[str, Any], link: WorkerContext) -> str:
    """One rank raises, the others wait."""
    if link.rank_info.rank == config["fails"]:
        raise ValueError("two\nlines")
    return wait(config, link)


def exits(config: dict[str, Any], link: WorkerContext) -> None:
    """End as a library might that thinks the process is its own."""
    raise SystemExit(3)


def mute(config: dict[str, Any], link: WorkerContext) -> str:
    """Close what is printed to, as objects or beneath them, with words still unsaid; then end well or badly."""
    print("not said yet")
    for stream in (sys.stdout, sys.stderr):
        stream.close() if config["how"] == "objects" else os.close(stream.fileno())
    if config["fails"]:
        raise ValueError("nobody can print this")
    return "done"


def eat(config: dict[str, Any], link: WorkerContext) -> str:
    """Fill the memory of a control group."""
    Path(config["group"], "cgroup.procs").write_text(str(os.getpid()))
    eaten = []
    while True:
        eaten.append(b"x" * 2**20)

"""What ranks on a GPU run in these tests: entry points of a gang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import job, micro_batches, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.device import Device, close_device, open_device
from orchestrator.parallel.device import make_ready as make_ready  # of a standby
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine


def allocate(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Take memory of the device in a process that was forked; with `kills`, die with it."""
    began = time.monotonic()
    device = torch.device(config["device"])
    held = torch.ones(int(config["bytes"]) // 4, device=device)
    last = float(held[-1024:].mean())  # of all of it there would not be room for another copy
    context.report(1)
    if config.get("kills"):
        time.sleep(1.0)  # until the report has left
        os.kill(os.getpid(), signal.SIGKILL)
    return {"mean": last, "seconds": time.monotonic() - began}


def small_job(kind: str) -> JobSpec:
    """A job of a small model in bf16, whose ranks take a GPU if `kind` is cuda."""
    spec = job({"model": "gpt-tiny", "train": {"precision": "bf16"}})
    worker = spec.resources.per_worker.model_copy(update={"gpu": int(kind == "cuda")})
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"per_worker": worker})})


def runs_out(config: dict[str, Any], context: WorkerContext) -> None:
    """Ask in the first step for more than the device has, as a rank of a group that has its communicators."""
    spec, layout = small_job(config["device"]), Layout(micro_batch=2)
    device, workload = open_device(spec.train, spec.resources.per_worker, context), workload_of(spec)
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(spec.seed)
    runner: Any = engine.passes.runner
    runner.train = lambda _: torch.empty(1 << 46, dtype=torch.uint8, device=config["device"])
    engine.train_step(micro_batches(workload, spec, layout, 0), 1e-3)


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


def begin(config: dict[str, Any], context: WorkerContext) -> dict[str, float]:
    """Seconds from the launch, at the moment "launched", until this process runs it, has a context, has multiplied in
    both passes, has a process group with a communicator, and has trained a step and a second one."""
    found: dict[str, float] = {}

    def note(phase: str) -> None:
        if config["device"] == "cuda":
            torch.cuda.synchronize()
        found[phase] = time.time() - config["launched"]

    found["running"] = time.time() - config["launched"]
    torch.zeros(1, device=config["device"])
    note("context")
    rows = torch.ones(64, 64, device=config["device"], requires_grad=True)
    (rows @ rows).sum().backward()
    note("products")
    spec = small_job(config["device"])
    device, layout, workload = (
        open_device(spec.train, spec.resources.per_worker, context),
        Layout(micro_batch=2),
        workload_of(spec),
    )
    note("group")
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(spec.seed)
    note("engine")
    for step in range(2):
        engine.train_step(micro_batches(workload, spec, layout, step), 1e-3)
        note(f"step {step + 1}")
    engine.close()
    close_device()
    return found


def over_gloo(config: dict[str, Any], context: WorkerContext) -> list[float]:
    """The losses of steps of a rank that may share its device, since gloo carries what ranks tell each other."""
    info = context.rank_info
    store = context.store or dist.TCPStore(info.host, context.store_port(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size)
    assert dist.group.WORLD is not None
    layout = Layout(dp=info.world_size, micro_batch=2)
    spec = job(config["of"])
    workload = workload_of(spec)
    engine = TorchEngine(
        spec.engine,
        workload,
        layout,
        Device(torch.device(config["device"]), torch.bfloat16, dist.group.WORLD),
    )
    engine.initialise(spec.seed)
    batches = [micro_batches(workload, spec, layout, step) for step in range(4)]
    losses = [engine.train_step(each, 1e-3).loss for each in batches]
    dist.destroy_process_group()
    return losses

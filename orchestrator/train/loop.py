"""One rank's life: take a device, build, restore, train step by step, commit, end.

`main` is the entry point that every gang runs, on Ray actors, on local processes and under torchrun alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cluster.faults import Fault
from cluster.link import Link
from orchestrator.assemble import batches_of, workload_of
from orchestrator.checkpoint.manifest import CorruptCommit, Manifest
from orchestrator.checkpoint.store import Store
from orchestrator.data.batches import Batches, Prefetch, slices
from orchestrator.data.receipt import START, add, roll
from orchestrator.data.tokens import Tokens
from orchestrator.layout import Layout
from orchestrator.rundir import Row
from orchestrator.spec import JobSpec, parse
from orchestrator.train.agree import agree, gather_json
from orchestrator.train.device import close_device, open_device, peak_memory
from orchestrator.train.engine import Engine, Metrics
from orchestrator.train.engines import make_engine
from orchestrator.train.schedule import learning_rate
from orchestrator.train.task import Task
from workloads.workload import Batch


class NonFinite(ArithmeticError):
    """The loss or the gradient norm is not a number; every rank raises it at the same step, before any commit."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps: optimiser steps, samples and tokens consumed, and the receipt."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    receipt: str = START


def main(config: dict[str, Any], link: Link) -> dict[str, Any]:
    """Train as one rank. Returns {"step", "ended"}, where ended is steps, until or stop; a commit is in place."""
    task = Task(**config)
    spec, layout = parse(task.job), Layout.from_json(task.layout)
    device = open_device(spec, link)
    try:
        tokens = Tokens.open(task.data)
        workload = workload_of(spec, tokens)
        batches = batches_of(spec, tokens, workload)
        engine = make_engine(spec, workload, layout, device)
        store = Store(f"{task.run}/checkpoints")
        progress = _restore(engine, store, task, spec)
        try:
            return _train(task, spec, layout, link, engine, batches, store, progress)
        finally:
            engine.close()
    finally:
        close_device()


def _restore(engine: Engine, store: Store, task: Task, spec: JobSpec) -> Progress:
    """Take over the commit that the controller named, or begin."""
    if task.restore is None:
        engine.initialise(spec.seed)
        return Progress()
    try:
        manifest = store.manifest(task.restore)
        engine.load(store.reader(manifest))
    except CorruptCommit as error:
        # The controller reads the step in this line, and takes the commit before.
        raise CorruptCommit(f"step {task.restore}: {error}") from None
    return Progress(manifest.step, manifest.position, manifest.meta["tokens"], manifest.receipt)


def _train(
    task: Task,
    spec: JobSpec,
    layout: Layout,
    link: Link,
    engine: Engine,
    batches: Batches,
    store: Store,
    progress: Progress,
) -> dict[str, Any]:
    last = min(task.until, spec.train.steps)
    committed = progress.step if task.restore is not None else -1
    stop = False
    faults = [Fault.parse(text) for text in task.faults]
    with Prefetch(_samples(spec, layout, batches, progress), progress.step) as prefetched:
        while progress.step < last and not stop:
            for fault in faults:
                fault.strike(link.seat.rank, progress.step + 1, task.attempt)
            began = time.perf_counter()
            micro_batches, digest = prefetched.next()
            data_seconds = time.perf_counter() - began
            lr = learning_rate(spec.train.optimizer, progress.step, spec.train.steps)
            _seed_step(spec.seed, progress.step, link.seat.rank)
            metrics = _step(engine, micro_batches, lr, progress.step + 1, layout)
            total, stop = agree(digest, link.stop_requested())
            progress = _advance(spec, progress, total)
            _refuse_non_finite(metrics, progress.step)
            row = _row(spec, layout, task, progress, metrics, lr, time.perf_counter() - began, data_seconds)
            if task.commit and (progress.step % spec.checkpoint.every == 0 or progress.step == last or stop):
                began = time.perf_counter()
                _commit(store, engine, link, task, layout, progress, row)
                row["commit_seconds"] = time.perf_counter() - began
                committed = progress.step
            link.report(progress.step, row if link.seat.rank == 0 else None)
    if task.commit and committed != progress.step:
        _commit(store, engine, link, task, layout, progress, None)
    ended = "steps" if progress.step >= spec.train.steps else "stop" if stop else "until"
    return {"step": progress.step, "ended": ended}


def _step(engine: Engine, micro_batches: list[Batch], lr: float, step: int, layout: Layout) -> Metrics:
    """One step; whatever it raises says where."""
    try:
        return engine.train_step(micro_batches, lr)
    except Exception as error:
        error.add_note(f"at step {step}, pipeline stage {layout.coordinate(dist.get_rank())['pp']}")
        raise


def _samples(
    spec: JobSpec, layout: Layout, batches: Batches, progress: Progress
) -> Callable[[int], tuple[list[Batch], int]]:
    """What gives this rank's micro-batches of a step, with the digest of the samples in them.

    Ranks of one tensor, context or pipeline group read the same samples; the first of them counts them.
    """
    size, place = spec.train.global_batch, layout.coordinate(dist.get_rank())
    counts = place["pp"] == place["cp"] == place["tp"] == 0

    def make(step: int) -> tuple[list[Batch], int]:
        start = progress.position + (step - progress.step) * size
        mine = slices(start, size, place["dp"], layout.dp, layout.micro_batch)
        parts = [batches.batch(position, count) for position, count in mine]
        return [batch for batch, _ in parts], add(digest for _, digest in parts) if counts else 0

    return make


def _seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout is a function of (seed, step, rank), so there is no random state to save."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


def _advance(spec: JobSpec, progress: Progress, digest: int) -> Progress:
    size = spec.train.global_batch
    return Progress(
        step=progress.step + 1,
        position=progress.position + size,
        tokens=progress.tokens + size * spec.data.sequence_length,
        receipt=roll(progress.receipt, digest),
    )


def _refuse_non_finite(metrics: Metrics, step: int) -> None:
    for name, value in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm)):
        if value != value or abs(value) == float("inf"):
            raise NonFinite(f"{name} is {value} at step {step}; lower train.optimizer.lr or look at the data")


def _row(
    spec: JobSpec,
    layout: Layout,
    task: Task,
    progress: Progress,
    metrics: Metrics,
    lr: float,
    seconds: float,
    data_seconds: float,
) -> Row:
    tokens = spec.train.global_batch * spec.data.sequence_length
    return {
        "step": progress.step,
        "loss": metrics.loss,
        "lr": lr,
        "grad_norm": metrics.grad_norm,
        "tokens": progress.tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "data_seconds": data_seconds,
        "commit_seconds": 0.0,
        "samples": progress.receipt,
        "layout": str(layout),
        "attempt": task.attempt,
        "memory_bytes": peak_memory(),
        "time": time.time(),
        **metrics.extra,
    }


def _commit(
    store: Store, engine: Engine, link: Link, task: Task, layout: Layout, progress: Progress, row: Row | None
) -> Manifest | None:
    """All ranks write their part, the first publishes. Returns the manifest there, None elsewhere.

    The rows that nobody has stored yet go into the manifest: a run that is killed right after a commit then
    misses none of them.
    """
    rank = dist.get_rank()
    records = store.write_shard(progress.step, rank, engine.state())
    gathered = gather_json(records)
    if rank:
        dist.barrier()
        return None
    meta = {
        "position": progress.position,
        "receipt": progress.receipt,
        "tokens": progress.tokens,
        "attempt": task.attempt,
        "layout": layout.to_json(),
        "engine": layout.engine,
        "seed": task.job["seed"],
        "data": task.data,
        "rows": [*link.unsaved_rows(), *([row] if row else [])],
    }
    manifest = store.publish(progress.step, [r for part in gathered for r in part], meta)
    store.prune(task.job["checkpoint"]["keep"])
    dist.barrier()
    return manifest

"""The row of a step in metrics.jsonl: the numbers of the step, and facts about this rank's machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.machine import this_machine
from orchestrator.parallel.device import peak_memory
from orchestrator.parallel.layout import Layout
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_types import StepRow
from orchestrator.train.engines.engine import Metrics
from orchestrator.train.step_samples import StepPlan
from orchestrator.train.task import Task
from orchestrator.train.training_progress import TrainingProgress
from workloads.model.kernels import noting


def model_flops_per_second(flops_per_token: float, tokens_per_second: float, share: float = 1.0) -> float:
    """Return the model's FLOPs per second, over all ranks.

    Recomputed activations do not count.

    Args:
        flops_per_token: of a forward and a backward pass over a row of full length.
        tokens_per_second: tokens of the global batch per second.
        share: length of the rows as a share of the full length.
    """
    return flops_per_token * tokens_per_second * share


def mfu(flops_per_second: float, peak_flops: float, ranks: int) -> float:
    """Return the model FLOPs utilisation, a share of the peak of `ranks` devices of `peak_flops` FLOPs per second each.

    Source: Chowdhery et al., 2022, "PaLM", appendix B.

    Args:
        flops_per_second: of the model, over all ranks.
        peak_flops: FLOP/s of a device in matrix products.
        ranks: number of devices.
    """
    return flops_per_second / (peak_flops * ranks)


class RankRecord:
    """The fields of metric rows that describe this rank: its peak memory, machine and attention kernels."""

    def __init__(self, memory_before: int) -> None:
        """`memory_before`: bytes in use before the model was built, see `peak_memory`."""
        self._memory_before = memory_before
        self._last_memory: tuple[int, ...] = ()  # of every rank, in the last row; empty before the first
        self._kernels: set[str] = set()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Wrap every step. During the first one, note which kernels compute attention."""
        if self._last_memory:
            yield
            return
        with noting() as self._kernels:
            yield

    @property
    def memory(self) -> int:
        """Peak memory of this rank so far, in bytes."""
        return peak_memory(self._memory_before)

    def row(self, memory: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields for a step's row, given the peak bytes of all ranks.

        The first row also has the machine and the attention kernels. Later rows repeat the bytes of all ranks only
        when they have changed.
        """
        fields: dict[str, Any] = {"memory_bytes": memory[0]}
        if not self._last_memory:
            fields["machine"] = this_machine()
            fields["attention_kernels"] = sorted(self._kernels)
        if memory != self._last_memory:
            fields["memory_bytes_by_rank"] = memory
            self._last_memory = memory
        return fields


def step_row(
    metrics: Metrics,
    progress: TrainingProgress,
    plan: StepPlan,
    layout: Layout,
    task: Task,
    *,
    lr: float,
    seconds: float,
    data_seconds: float,
    share: float = 1.0,
) -> Row:
    """Return the row of a step, without the fields that describe the rank.

    Args:
        metrics: what the engine returned.
        progress: the progress after the step.
        plan: what a step reads.
        layout: how the ranks divide the work.
        task: gives the attempt, and the FLOPs of a token and of a worker.
        lr: the learning rate.
        seconds: duration of the step.
        data_seconds: how much of it was spent waiting for samples.
        share: mean length of the rows as a share of the full length, if they are cut to their samples.
    """
    tokens = plan.tokens
    row: StepRow = {
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
        "time": wall(),
    }
    row_length = plan.row_length(progress.step - 1)
    if task.flops_per_token:
        # Shorter rows cost their share of a full row's FLOPs.
        flops = model_flops_per_second(
            task.flops_per_token,
            tokens_per_second=row["tokens_per_second"],
            share=share * (row_length or plan.sequence_length) / plan.sequence_length,
        )
        row["model_flops_per_second"] = flops
        if task.peak_flops:
            row["mfu"] = mfu(flops, task.peak_flops, ranks=layout.world)
    if row_length:
        row["sequence_length"] = row_length
    if metrics.layers:
        row["layer_statistics"] = metrics.layers
    return {**row, **metrics.extra}

"""What a trial's run reached: the value of the search's metric, and the hours that it took."""

from __future__ import annotations

import math
import statistics

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.observe.config import SummarisedJob
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import totals_of
from orchestrator.storage.row_line import evaluations_in
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import BYTES, PARAMETERS

FP32 = 4
"""Bytes of a number in fp32."""
WEIGHTS = "model."
"""The prefix of the model's weights in a checkpoint."""


def value_of(
    metric: str, window: int, sweep: RunDir, name: str, rung: int, evaluations_every: int | None
) -> float:
    """Return the value of a metric of a search at a rung; NaN without a value.

    Args:
        metric: the metric, see `TuneSpec.metric`.
        window: the search's window.
        sweep: its directory.
        name: the name of the trial's run.
        rung: the step of the rung.
        evaluations_every: steps between evaluations, None without evaluations.

    Raises:
        InputError: the run does not have the metric.
    """
    if metric == PARAMETERS:
        return parameters_of(lineage.at(sweep, name))
    if metric == BYTES:
        return bytes_of(lineage.at(sweep, name))
    if "." not in metric:
        return trained_value(metric, window, sweep, name, rung)
    assert evaluations_every is not None
    return evaluated_value(metric, sweep, name, rung, evaluations_every)


def parameters_of(run: RunDir) -> float:
    """Return the number of parameters in the run's last checkpoint, without those of a frozen base; NaN without one."""
    commit = Store(run.commits).latest(deep=False)
    return float(sum(map(math.prod, _shapes(commit).values()))) if commit else math.nan


def bytes_of(run: RunDir) -> float:
    """Return the bytes of the weights in the run's last checkpoint, without those of a frozen base; NaN without one.

    Weights that the job quantises count as they are stored in an export, all others in fp32.
    """
    commit = Store(run.commits).latest(deep=False)
    if commit is None:
        return math.nan
    shapes = _shapes(commit)
    spec = read_job(run)
    stored = _bytes_of_quantised(run, commit.step) if spec and spec.quantize else {}
    return float(sum(stored.get(name, FP32 * math.prod(shape)) for name, shape in shapes.items()))


def _shapes(commit: CommitManifest) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights in a commit, by their names in the model."""
    tensors = commit.tensors.items()
    return {
        name.removeprefix(WEIGHTS): tuple(tensor.shape)
        for name, tensor in tensors
        if name.startswith(WEIGHTS)
    }


def _bytes_of_quantised(run: RunDir, step: int) -> dict[str, int]:
    """Return the bytes of the weights that the job of a run quantises, by name."""
    import torch

    from orchestrator.resolve.commit_model import model_of_run
    from workloads.model.fake_quantise import quantised_layers

    of_run = model_of_run(run.uri, step)
    assert of_run.spec.quantize is not None
    scheme = of_run.spec.quantize.scheme
    with torch.device("meta"):
        model = of_run.workload.build()
    layers = quantised_layers(model, of_run.workload.blocks(model), scheme)
    return {
        name: scheme.of(name).bytes_of(*layer.get_parameter("weight").shape) for name, layer in layers.items()
    }


def trained_value(metric: str, longest: int, sweep: RunDir, name: str, rung: int) -> float:
    """Return the mean of a training metric over the last steps up to a rung; NaN if all of them lack a value.

    Args:
        metric: a column of metrics.jsonl.
        longest: maximum length of the window, in steps.
        sweep: its directory.
        name: the name of the trial's run.
        rung: the step of the rung.

    Raises:
        InputError: no row has the metric.
    """
    # Early in training a mean over many steps would measure how fast the loss fell, not its level.
    window = min(longest, max(rung // 4, 1))
    recent = lineage.latest(sweep, name, rung, window)
    if not any(metric in row for row in recent):
        known = ", ".join(sorted(k for k, v in recent[-1].items() if isinstance(v, float))) if recent else ""
        raise InputError(f"no row has the metric {metric!r}", "tune.metric", f"known: {known}")
    result = [float(value) for row in recent if (value := row.get(metric)) is not None]
    return statistics.fmean(result) if result else math.nan


def evaluated_value(metric: str, sweep: RunDir, name: str, rung: int, every: int) -> float:
    """Return an evaluation's metric at the last evaluation, which is at the rung unless the run ended before it.

    Args:
        metric: the metric with its set, such as validation.loss.
        sweep: its directory.
        name: the name of the trial's run.
        rung: the step of the rung.
        every: steps between evaluations.

    Raises:
        InputError: nothing was evaluated.
    """
    held_out, _, kind = metric.partition(".")
    result = evaluations_in(lineage.latest(sweep, name, rung, every + 1))
    if not result:
        raise InputError(f"nothing was evaluated up to step {rung}", "evaluate.every", "lower it")
    return float(result[-1]["sets"][held_out].get(kind, math.nan))  # absent if nothing is predicted


def hours_of(job: SummarisedJob, run: RunDir) -> float:
    """Return the hours of the run so far, counted like `limits.hours`."""
    result = summary(job, None, run.rows("events.jsonl"), totals_of(run))["ledger"]
    return float(result["wall_seconds"] - result["seconds"].get("down", 0.0)) / 3600

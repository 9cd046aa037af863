"""The keys of rows as they are written, with their types. Files of earlier versions may lack some keys.

`row_line` checks rows that are read back, because a file may hold anything. The type checker checks rows that are
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class StepRow(TypedDict, total=False):
    """A row of metrics.jsonl: one optimizer step of one attempt.

    Times are unix seconds, durations are seconds. A metric without a value in the step is absent, except that `loss`
    is null. Objectives and routers add further metrics, which this type cannot name. Some of the keys:

    - `samples`: the receipt after the step.
    - `saves`: the outcome of each commit that ended since the row before.
    - `busy_seconds`: the time that each rank computed without waiting for others.
    - `machine`, `attention_kernels`: of rank 0, in the first row of an attempt.
    - `memory_bytes_by_rank`: the peak of each rank, if it changed since the row before.
    - `evaluations`: results on held-out text since the row before.
    - `padding`: the share of padding among the tokens, for packed samples.
    - `sequence_length`: the tokens of a row, if they change during the run.
    - `forward_seconds` to `agreement_seconds`: parts of `step_seconds` on rank 0, see
      `orchestrator.parallel.step_clock`. They do not add up to all of it.
    - `verified_by`: who computed the step again, "other" ranks or the "same" one; only in verified steps.
    - `layer_statistics`: those by parameter and layer, see `LayerStatistics`; only in steps that collect them.
    - `model_flops_per_second`: the sum over all ranks; `mfu` is its share of their peak.
    """

    step: int
    attempt: int
    time: float
    loss: float | None
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    pipeline_seconds: float
    optimizer_seconds: float
    agreement_seconds: float
    model_flops_per_second: float
    mfu: float
    commit_seconds: float
    verified_by: str
    layer_statistics: Mapping[str, Mapping[str, Any]]
    samples: str
    padding: float
    sequence_length: int
    layout: str
    memory_bytes: int
    memory_bytes_by_rank: Sequence[int]
    machine: dict[str, Any]
    attention_kernels: Sequence[str]
    saves: list[dict[str, Any]]
    busy_seconds: Sequence[float]
    evaluations: list[EvaluationRow]
    evaluation_seconds: float


class EvaluationRow(TypedDict):
    """A row of evals.jsonl: one evaluation after `step`, which took `seconds`. `sets` has the metrics of each set.

    `weights` is "averaged" if averaged weights were evaluated: the moving average, or that of the commits at
    `averaged_steps`. `samples` has each "prompt" of the job with the generated "text". `measured` is how the job
    measures, see `checkpoint.evaluations.measure_of`.
    """

    step: int
    attempt: int
    time: float
    seconds: float
    sets: dict[str, dict[str, float]]
    measured: NotRequired[dict[str, int | None]]
    weights: NotRequired[str]
    averaged_steps: NotRequired[list[int]]
    samples: NotRequired[list[dict[str, str]]]


class EventFields(TypedDict, total=False):
    """The fields of an event in events.jsonl, besides time, attempt, phase, reason and step.

    - `time`: replaces the time of writing, unix seconds.
    - Of a fault: `first_fault` and `explained` are for people. Decisions use `cause`, `node` and `rank`. `seen` is when
      it was noticed, `still_seconds` how long there had been no step, `lost_steps` and `seconds_lost` the work to
      repeat, `skipped` the samples to skip, `output` the last lines that the faulty rank printed.
    - Of a start: the layouts and the precision.
    - Of a train phase: the machines, their zones and their price.
    - `data`, `sets`: the prepared data, and that of each separate held-out set.
    - `base`, `teacher`: the initial weights, and those of the teacher.
    - `missing_rows`, `missing_events`: gaps in metrics.jsonl, and in events.jsonl by event number.
    - `last_seen`: the last sign of activity of the controller before. `controller_died`: the step of the newest
      commit when
      Ray restarted the controller.
    - `launched`: when the command that began the run was given.
    - `ceiling`: a limit that is near.
    - `extended`: the numbers of steps before and from now on, how many of them are the same (`settled`), and the commit
      to continue from.
    - `rolled_back`: the step before, the steps of the removed commits, and when the user asked for it.
    - `continued`: the commit of another run that the run began with.
    - `tasks`: the evaluation of the job's tasks.
    - `wrong_nodes`: the nodes that compute wrongly. They get no ranks until the run ends.
    - `stopping`: why the run was asked to end.
    - `saving`: the outcome of the save that the event reports.
    - `rollout_workers`: changes in the number of rollout workers: the `time`, how many `workers` run from then on, and
      the `machines` of those that are on nodes without ranks, with their price `usd_per_hour`.
    """

    time: float
    first_fault: str | None
    explained: str
    cause: dict[str, Any]
    node: str
    rank: int
    wrong_nodes: list[str]
    seen: float
    still_seconds: float
    lost_steps: int
    seconds_lost: float | None
    skipped: dict[str, Any] | None
    output: list[str]
    layout: dict[str, Any]
    layout_before: str | None
    layout_after: str | None
    precision: str
    machines: list[Any]
    zones: list[Any]
    usd_per_hour: float | None
    data: str
    sets: dict[str, str]
    base: dict[str, Any] | None
    teacher: dict[str, Any] | None
    missing_rows: list[list[int]]
    missing_events: list[list[int]]
    last_seen: float | None
    launched: float
    controller_died: int
    stopping: str
    saving: str
    ceiling: dict[str, Any]
    extended: dict[str, int]
    rolled_back: dict[str, Any]
    continued: dict[str, Any]
    tasks: EvaluationRow
    rollout_workers: list[dict[str, Any]]

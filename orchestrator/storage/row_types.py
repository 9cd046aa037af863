"""The keys of rows as they are written, with their types; files of runs begun by earlier versions may lack some.

What is read back is checked by `row_line`, since a file may hold anything; what is written is checked by the type
checker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class StepRow(TypedDict, total=False):
    """A row of metrics.jsonl: one optimiser step of one attempt.

    Times are unix seconds, durations seconds. `loss` is null where the step predicts nothing; a further metric that is
    of nothing is absent. `samples` is the receipt after the step, `saves` the outcome of each commit that ended since
    the row before, `busy_seconds` the time that each rank computed by itself,
    `machine` that of rank 0 and `attention_kernels` what it computes attention by, in the first row of an attempt,
    `memory_bytes_by_rank` what each rank has needed at most, where that has changed since the row before,
    `evaluations` those of held-out text since the row before, `padding` the share of the tokens that are padding, where
    samples are packed, `sequence_length` the tokens of a row, where they change. `forward_seconds` to
    `agreement_seconds` are the parts of `step_seconds` on rank 0, see `orchestrator.parallel.step_clock`; the rest of
    `step_seconds` has no name. `model_flops_per_second` is of all ranks, and `mfu` its share of what they could do. An
    objective or a router adds metrics of its own, which the type cannot name.
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

    `weights` is "averaged" if the weights were: all along, or over the commits at `averaged_steps`. `samples`
    has each "prompt" of the job and the "text" that the model said after it. `measured` is how the job measures, see
    `checkpoint.evaluations.measure_of`.
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
    """What an event of events.jsonl says beside time, attempt, phase, reason and step.

    `time` replaces the time of writing, unix seconds. Of a fault: `first_fault` and `explained` are for people,
    `cause`, `node` and `rank` are what is decided by, `seen` is when it was noticed, `still_seconds` how long
    there had been no step, `lost_steps` and `seconds_lost` what must be done again, `skipped` the window of
    samples that is left out, `output` the last lines that the rank at fault printed. Of a start: the layouts and
    the precision. Of a train phase: the machines, their zones and their price. `data` is the prepared data that the
    run began with, `sets` that of each set of held-out text of its own, `base` the weights that it began with,
    `missing_rows` the gaps in metrics.jsonl, `missing_events` those in events.jsonl, by the numbers of events,
    `last_seen` the last sign of life of the controller before, `launched` when the command was given that began it,
    `controller_died` the step of the newest commit when Ray started the controller again, `ceiling` a limit that is
    near, `extended` how many steps the run had and has from here on, how many of them are the same (`settled`), and
    the commit that it goes on from; `continued` the commit of another run that the run began with; `tasks` is
    the evaluation of the job's tasks, `stopping` why the run was asked to end, `saving` how the save ended that is told
    of.
    """

    time: float
    first_fault: str | None
    explained: str
    cause: dict[str, Any]
    node: str
    rank: int
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
    missing_rows: list[list[int]]
    missing_events: list[list[int]]
    last_seen: float | None
    launched: float
    controller_died: int
    stopping: str
    saving: str
    ceiling: dict[str, Any]
    extended: dict[str, int]
    continued: dict[str, Any]
    tasks: EvaluationRow

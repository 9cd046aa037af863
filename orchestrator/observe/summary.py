"""The summary of a run: how it ended, what it cost, and predicted and measured speed. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.loss_unit import predicts_text
from orchestrator.config.metric_names import parts_of_loss
from orchestrator.config.outcome import ENDED
from orchestrator.config.resources import ResourceSpec
from orchestrator.controller.config import LimitSpec
from orchestrator.observe.audit import audit, memory_audit
from orchestrator.observe.config import SummarisedJob
from orchestrator.observe.energy import energy_of
from orchestrator.observe.goodput import BETWEEN_COMMANDS, Phase, ledger, timeline
from orchestrator.observe.step_parts import latest, why_slow
from orchestrator.observe.totals import Row, RunTotals, micros, never_back
from orchestrator.storage.row_log import missing_numbers


@dataclass(frozen=True)
class RolloutUse:
    """A period with the same rollout workers.

    Attributes:
        seconds: its length.
        workers: how many ran.
        usd_per_hour: the price of the machines that had rollout workers and no ranks; None if it is unknown.
    """

    seconds: float
    workers: int
    usd_per_hour: float | None = None


def rollout_use(events: Sequence[Row], phases: Sequence[Phase]) -> list[RolloutUse]:
    """Return the periods of a timeline, each with its rollout workers.

    Args:
        events: rows of events.jsonl.
        phases: their timeline. Rollout workers end with their controller, so none ran while no controller did.
    """
    worker_changes = [change for event in events for change in event.get("rollout_workers") or ()]
    if not worker_changes or not phases:
        return []
    times = never_back([micros(change["time"]) for change in worker_changes])
    changes = [
        (at, change["workers"], change["usd_per_hour"])
        for at, change in zip(times, worker_changes, strict=True)
    ]
    changes += [(phase.start, 0, None) for phase in phases if phase.name in ("down", BETWEEN_COMMANDS)]
    changes.sort(key=lambda change: change[0])
    begin, end = phases[0].start, phases[-1].end
    bounds = [*(min(max(at, begin), end) for at, _, _ in changes), end]
    return [
        RolloutUse((bounds[number + 1] - bounds[number]) / 1e6, workers, usd)
        for number, (_, workers, usd) in enumerate(changes)
    ]


def rollout_worker_seconds(events: Sequence[Row], phases: Sequence[Phase]) -> float:
    """Return seconds times rollout workers."""
    return sum(use.seconds * use.workers for use in rollout_use(events, phases))


FAULT_KEYS = ("time", "attempt", "step", "first_fault", "explained", "output", "seconds_lost")
"""The fields of a fault's event that the summary has."""
_HELD = frozenset({"start", "train", "stop"})  # phases in which the gang occupies its workers


def summary(
    job: SummarisedJob,
    plan: Mapping[str, Any] | None,
    events: Sequence[Row],
    rows: RunTotals,
    manifest_meta: Mapping[str, Any] | None = None,
    *,
    unigram_entropy: float | None = None,
    sample: str | None = None,
    now: float | None = None,
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        job: what the summary says of the job.
        plan: the content of plan.json.
        events: the rows of events.jsonl.
        rows: the totals of metrics.jsonl.
        manifest_meta: the `meta` of the last commit.
        unigram_entropy: in nats per token; omitted if the loss is not that of a text's tokens.
        sample: a text that the model generated.
        now: unix seconds, for an unfinished run.

    Unknown values are None.
    """
    last = rows.last
    objective = job.objective
    unigram_entropy = unigram_entropy if predicts_text(objective) else None
    phases = timeline(events, rows, now)
    used = worker_seconds(phases, rows, events) / 3600
    generating = rollout_worker_seconds(events, phases) / 3600
    held_seconds = sum(phase.seconds for phase, _ in held(phases, rows))
    ends = [event for event in events if event.get("phase") in ENDED]
    running = not events or events[-1].get("phase") not in ENDED
    loss = last.get("loss")
    of_labels = last.get("label_loss", loss)
    return {
        "name": job.name,
        "objective": objective,
        "metrics": job.metrics,
        "state": "running" if running else events[-1]["phase"],
        "reason": None if running else ends[-1].get("reason"),
        "started": events[0].get("time") if events else None,
        "ended": None if running else ends[-1].get("time"),
        "step": last.get("step", 0),
        "steps": job.steps,
        "precision": job.precision,
        "tokens": last.get("tokens", 0),
        "final_loss": loss,
        "final_loss_parts": parts_of_loss(last),
        "final_reward": last.get("reward"),
        "evaluation": rows.evaluations[0] if rows.evaluations else None,
        "tasks": next(iter(tasks_in(events)), None),
        "unigram_entropy": unigram_entropy,
        "below_unigram": None
        if unigram_entropy is None or of_labels is None
        else bool(of_labels < unigram_entropy),
        "receipt": (manifest_meta or {}).get("samples") or last.get("samples"),
        "continued_from": next((each["continued"] for each in events if each.get("continued")), None),
        "attempts": len({event.get("attempt") for event in events if event.get("phase") == "start"}),
        "faults": [
            {key: event.get(key) for key in FAULT_KEYS} for event in events if event.get("first_fault")
        ],
        "layouts": rows.layouts,
        "missing_rows": [list(gap) for gap in rows.missing],
        "missing_events": missing_numbers(events),
        "ledger": ledger(events, rows, now),
        "predicted": _predicted(plan),
        "audit": audit(plan, rows.parts.means, rows.parts.late),
        "machine": rows.machine,
        "attention_kernels": rows.attention_kernels,
        "memory_audit": memory_audit(plan, rows.rank_memory),
        "measured": measured(rows),
        "step_parts": rows.parts.means,
        "late_seconds": rows.parts.late,
        "mfu": rows.parts.mfu,
        "why_slow": why_slow(rows.parts, latest(rows.newest[::-1])),
        "worker_hours": used,
        **({"rollout_worker_hours": generating} if generating else {}),
        "evaluated_beside": _extra_worker_cost(job.evaluates_beside, job.limits.usd_per_worker_hour, rows),
        **({} if rows.padding is None else {"padding": rows.padding}),
        **_footprint(
            job.limits,
            job.resources,
            held_seconds=held_seconds,
            worker_hours=used,
            rows=rows,
            usd=cost(phases, rows, events, job.limits.usd_per_worker_hour),
            events=events,
        ),
        "sample": sample,
    }


def tasks_in(events: Sequence[Row]) -> list[Row]:
    """Return the evaluations of a job's tasks, newest first."""
    return [event["tasks"] for event in reversed(events) if event.get("tasks")]


def measured(rows: RunTotals) -> dict[str, float | None]:
    """Return medians of steps, see `RunTotals.medians`, and peak memory."""
    memory = max(rows.rank_memory, default=rows.memory_bytes)
    return rows.medians | {"memory_bytes": memory}


def worker_seconds(phases: Sequence[Phase], rows: RunTotals, events: Sequence[Row]) -> float:
    """Return seconds times workers: over all gangs, from the start of each until it was stopped, and over rollout
    workers.
    """
    of_gangs = sum(phase.seconds * world(layout) for phase, layout in held(phases, rows))
    return of_gangs + rollout_worker_seconds(events, phases)


def cost(phases: Sequence[Phase], rows: RunTotals, events: Sequence[Row], usd: float) -> float | None:
    """Return the cost in USD of all gangs, from the start of each until it was stopped, and of rollout workers; None if
    no price is known.

    `usd` is the price of a worker for an hour. If it is 0, the prices of the machines in the events are used.
    """
    rates = {e["attempt"]: e["usd_per_hour"] for e in events if e.get("usd_per_hour") is not None}
    total = 0.0
    is_known = bool(usd)
    for phase, layout in held(phases, rows):
        if usd:
            total += phase.seconds / 3600 * usd * world(layout)
        elif phase.attempt in rates:
            is_known = True
            total += phase.seconds / 3600 * rates[phase.attempt]
    if usd:
        return total + rollout_worker_seconds(events, phases) / 3600 * usd
    for use in rollout_use(events, phases):
        if use.usd_per_hour is not None:
            is_known = True
            total += use.seconds / 3600 * use.usd_per_hour
    return total if is_known else None


def why_unknown(limits: LimitSpec, events: Sequence[Row]) -> str:
    """Return why the cost of a run is unknown: the key of the job, or the line of its price table, that is missing."""
    if not limits.prices:
        return "neither limits.usd_per_worker_hour nor limits.prices is set"
    return _unpriced(events) or "no machine of limits.prices was seen"


def _unpriced(events: Sequence[Row]) -> str:
    """Return which machines have no line in the price table; empty if all have."""
    rows_with_machines = [
        *events,
        *(change for event in events for change in event.get("rollout_workers") or ()),
    ]
    for row in rows_with_machines:
        if row.get("machines") and row.get("usd_per_hour") is None:
            unpriced = {
                ", ".join(str(machine.get(key) or "?") for key in ("machine", "market", "zone"))
                for machine in row["machines"]
            }
            return f"limits.prices has no line for one of these machines: {'; '.join(sorted(unpriced))}"
    return ""


def held(phases: Sequence[Phase], rows: RunTotals) -> list[tuple[Phase, Any]]:
    """Return the phases in which a gang held workers, each with its layout."""
    by_attempt = dict(rows.layout_of)
    for phase in phases:
        if phase.layout and phase.name in ("start", "train"):
            by_attempt[phase.attempt] = phase.layout
    return [(phase, by_attempt.get(phase.attempt)) for phase in phases if phase.name in _HELD]


def world(layout: Any) -> int:
    """Return the number of ranks of a layout, given as a mapping or as a string ("dp2 tp2 zero1 mb4"); 1 if unknown."""
    if isinstance(layout, Mapping):
        return math.prod(int(layout.get(axis, 1)) for axis in ("pp", "dp", "cp", "tp"))
    return math.prod(int(degree) for degree in re.findall(r"\b(?:pp|dp|cp|tp)(\d+)\b", str(layout or "")))


def _extra_worker_cost(
    evaluates_beside: bool, usd_per_worker_hour: float | None, rows: RunTotals
) -> dict[str, float | None] | None:
    """Return worker hours and USD of evaluations by extra workers, which no other figure includes; None without any."""
    if not evaluates_beside:
        return None
    hours = rows.beside_seconds / 3600
    price = usd_per_worker_hour
    return {"worker_hours": hours, "cost_usd": hours * price if price else None}


def _footprint(
    limits: LimitSpec,
    resources: ResourceSpec,
    held_seconds: float,
    worker_hours: float,
    rows: RunTotals,
    usd: float | None,
    events: Sequence[Row],
) -> dict[str, Any]:
    """Return cost and energy of these worker hours, with their assumptions as text; `cost_unknown` says which key of
    the job is missing."""
    worker = resources.per_worker
    price = limits.usd_per_worker_hour
    unknown = None if usd is not None else why_unknown(limits, events)
    basis = f"Cost is unknown: {unknown}."
    if usd is not None:
        basis = "Cost is hours of whole machines x their prices in the table."
        if unpriced := _unpriced(events):
            basis += f" It leaves out some: {unpriced}."
    if price:
        basis = f"Cost is worker hours x {price:g} USD."
    energy = energy_of(worker, worker_hours, held_seconds, rows.energy)
    return {
        "cost_usd": usd,
        "cost_unknown": unknown,
        **energy,
        "assumptions": f"{energy.pop('energy_basis')} {basis}",
    }


def _predicted(plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the plan's values of the figures in `measured`; for steps the median, if the plan has it."""
    predicted = (plan or {}).get("predicted") or {}
    figures = {key: predicted.get(key) for key in ("step_seconds", "tokens_per_second", "memory_bytes")}
    median = (predicted.get("step_seconds_quantiles") or {}).get("0.5")
    if median and figures["step_seconds"] and figures["tokens_per_second"]:
        figures["tokens_per_second"] *= figures["step_seconds"] / median
        figures["step_seconds"] = median
    return figures

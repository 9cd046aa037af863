"""The report of a run as one HTML page: what happened, where the time went, and what was produced."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.config.errors import InputError
from orchestrator.config.loss_unit import counted, loss_unit, read_unit
from orchestrator.config.outcome import ENDED
from orchestrator.config.redact import redact
from orchestrator.observe.formatting import count, duration, run_name
from orchestrator.observe.goodput import BETWEEN_COMMANDS, BUCKETS, Phase, timeline, with_end_of
from orchestrator.observe.last_status import if_lost
from orchestrator.observe.pages import charts, layer_table
from orchestrator.observe.pages.kept_rollouts import rollouts_shown
from orchestrator.observe.pages.page import render, size
from orchestrator.observe.pages.pipeline_timeline import timelines
from orchestrator.observe.step_parts import in_table
from orchestrator.observe.summary import summary, tasks_in
from orchestrator.observe.totals import CHARTED, UPDATE, Row, RunTotals, totals_of
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.row_log import steps_text
from orchestrator.storage.run_directory import PRECISION, RunDir

WIDE, LOW = (1040.0, 300.0), (508.0, 190.0)  # width and height of charts, in SVG units
LANE, LANES = 26.0, 14  # height of an attempt's lane in the timeline, and number of attempts shown
EVENTS_SHOWN, MARKS_SHOWN = (
    500,
    100,
)  # latest events in the table, and latest attempts and faults in the charts
EVALUATIONS_SHOWN = 50  # latest evaluations in the table
SAYINGS_SHOWN = 7  # texts of a prompt: the first, the last and some between
RANKS_SHOWN = 16  # ranks whose memory is listed individually
LAYOUTS_SHOWN = 12  # layouts in a table; the rest is only counted

BUCKET_NAMES = {
    "launch": "starting the command",
    "prepare": "preparing data",
    "start": "first start",
    "step": "steps that count",
    "transfer": "sending weights for rollouts",
    "generate": "waiting for generated answers",
    "reward": "computing rewards",
    "data_stall": "waiting for samples",
    "checkpoint_stall": "waiting for commits",
    "evaluate": "evaluating",
    "lost_work": "work that was lost",
    "detection": "noticing faults",
    "re_plan": "stopping and replanning",
    "queue": "waiting in the queue",
    "restore": "later starts and restores",
    "export": "exporting",
    "idle": "waiting for workers, and between steps",
    "down": "no controller ran",
    "finish": "summary and report",
    "shutdown": "ending Ray",
}
BUCKET_OF = {"start": "restore", "train": "step", "wait": "idle", "stop": "re_plan", BETWEEN_COMMANDS: "down"}


def report(run_dir: RunDir, rows: RunTotals | None = None) -> str:
    """Return the report page of a run, finished or not. `rows` are its totals, if they are known already.

    Raises InputError if job.yaml is missing or unreadable.
    """
    return render("report", _content(run_dir, rows))


def _content(run_dir: RunDir, rows: RunTotals | None) -> dict[str, Any]:
    """Return the values of all names in the template."""
    job = run_dir.read_text("job.yaml") or ""
    spec = read_job(run_dir)
    if spec is None:
        raise InputError("there is no run here", run_dir.uri, "give a run directory, such as runs/<name>")
    plan = run_dir.read_json_or_empty("plan.json")
    events = redact(run_dir.rows(EVENTS))
    rows = rows or totals_of(run_dir)
    saved = run_dir.read_json_or_empty("summary.json")
    saved_texts = {"unigram_entropy": saved.get("unigram_entropy"), "sample": saved.get("sample")}
    fields = {**saved, **summary(spec.summarised, plan, events, rows, **saved_texts)}
    fields |= if_lost(run_dir)
    fields["ledger"] = with_end_of(fields["ledger"], saved, fields["ended"])
    phases = timeline(events, rows)
    return {
        "spec": spec,
        "counted": counted(spec.workload.objective),
        "unit": loss_unit(spec.workload.objective),
        "read": read_unit(spec.workload.objective),
        "missing": steps_text(fields["missing_rows"]),
        "missing_events": steps_text(fields["missing_events"]),
        "name": run_name(spec.name, run_dir.name),
        "run": redact(run_dir.uri),
        "job": redact(job),
        "summary": redact(fields),
        "ledger": _ledger(fields["ledger"]),
        "parts": in_table(fields["step_parts"]),
        "plots": _plots(rows, events, fields),
        "timeline": _timeline(phases),
        "plan": _plan(plan),
        "precision": run_dir.read_json_or_empty(PRECISION).get("why", ""),
        "compared": _compared(fields),
        "audit": _audit(fields["audit"]),
        "memory": _memory(fields["memory_audit"]),
        "pipeline": timelines(run_dir, plan),
        "layers": layer_table.layer_table(rows.layers),
        "evaluations": _evaluations(rows.evaluations),
        "tasks": _evaluations(tasks_in(events)),
        "sayings": redact(_sayings(rows)),
        "rollouts": redact(rollouts_shown(run_dir.uri)) if spec.rollout else [],
        "averaged": any(evaluation.get("weights") for evaluation in rows.evaluations[:1]),
        "commits": _commits(run_dir),
        "events": _events(events),
        "earlier": max(0, len(events) - EVENTS_SHOWN),
    }


def _ledger(ledger: dict[str, Any]) -> list[dict[str, Any]]:
    wall = ledger["wall_seconds"] or 1.0
    seconds = ledger["seconds"]
    shown = [bucket for bucket in BUCKETS if seconds[bucket] > 0]
    return [
        {"bucket": b, "name": BUCKET_NAMES[b], "seconds": seconds[b], "share": seconds[b] / wall}
        for b in sorted(shown, key=lambda bucket: -seconds[bucket])
    ]


def _plots(rows: RunTotals, events: Sequence[Row], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the charts: loss with attempts, lost steps and unigram entropy; speed; gradient norm."""
    starts = sorted(rows.first_step.items(), key=lambda item: item[1])
    marks = [(float(step), f"attempt {attempt}") for attempt, step in starts][1:][-MARKS_SHOWN:]
    stops = [e for e in events if e.get("lost_steps") and e.get("step") is not None][-MARKS_SHOWN:]
    bands = [(float(e["step"] - e["lost_steps"]), float(e["step"])) for e in stops]
    entropy = summary["unigram_entropy"]
    drawn = []
    unit = loss_unit(summary["objective"])
    read = read_unit(summary["objective"])
    titles = (
        ("Reward", "mean over generated answers"),
        ("Loss", unit),
        ("Speed", f"{read} per second"),
        ("Gradient norm", "before clipping"),
        ("Length of answers", "tokens"),
        ("Open heads", "attention heads whose gate is not 0"),
    )
    for key, (title, unit) in zip(CHARTED, titles, strict=True):
        points = list(rows.points[key])
        loss = key == "loss"
        plot = charts.line_plot(
            points,
            *(WIDE if loss else LOW),
            marks=marks if loss else [(at, "") for at, _ in marks],
            bands=bands if loss else [],
            level=entropy if loss else None,
            from_zero=not loss,
            others=_held_out_losses(rows) if loss else {},
        )
        if plot:
            drawn.append({"key": key, "title": title, "unit": unit, "plot": plot, "final": points[-1][1]})
    return drawn


def _held_out_losses(rows: RunTotals) -> dict[str, list[charts.Point]]:
    """Return the loss of each held-out set by step, oldest first."""
    lines: dict[str, list[charts.Point]] = {}
    for evaluation in reversed(rows.evaluations):
        for name, metrics in evaluation["sets"].items():
            if "loss" in metrics:
                lines.setdefault(name, []).append((float(evaluation["step"]), metrics["loss"]))
    return lines


def _evaluations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each set or task of the latest evaluations, newest first, with all metrics by name."""
    return [
        {"step": evaluation["step"], "set": name, "metrics": metrics}
        for evaluation in rows[:EVALUATIONS_SHOWN]
        for name, metrics in evaluation["sets"].items()
    ]


def _sayings(rows: RunTotals) -> list[dict[str, Any]]:
    """Return for each prompt the steps and texts of the first evaluation, the last and some between, oldest first.

    Line ends are shown as a sign, because many models generate little else at first.
    """
    with_samples = [evaluation for evaluation in reversed(rows.evaluations) if evaluation.get("samples")]
    parts = max(min(len(with_samples), SAYINGS_SHOWN) - 1, 1)
    shown = [
        with_samples[round(part * (len(with_samples) - 1) / parts)]
        for part in range(min(len(with_samples), SAYINGS_SHOWN))
    ]
    texts_of: dict[str, list[tuple[int, str]]] = {}
    for evaluation in shown:
        for sample in evaluation["samples"]:
            texts_of.setdefault(sample["prompt"], []).append(
                (evaluation["step"], sample["text"].replace("\n", "↵ "))
            )
    return [{"prompt": prompt, "said": text} for prompt, text in texts_of.items()]


def _timeline(phases: Sequence[Phase]) -> dict[str, Any] | None:
    """Return the timeline: a lane for each of the last LANES attempts, and one for the time before the first."""
    lanes = list(dict.fromkeys(phase.attempt for phase in phases))[-LANES:]
    shown = [phase for phase in phases if phase.attempt in lanes]
    length = (shown[-1].end - shown[0].start) / 1e6 if shown else 0.0
    if not length:
        return None
    axis = charts.time_axis(length, WIDE[0], charts.LEFT + 24, len(lanes) * LANE)
    start = shown[0].start
    first = next((phase for phase in phases if phase.name == "start"), None)
    bars = [
        {
            "x": axis.x((phase.start - start) / 1e6),
            "y": lanes.index(phase.attempt) * LANE + 4,
            "width": max(1.0, axis.x((phase.end - start) / 1e6) - axis.x((phase.start - start) / 1e6)),
            "bucket": "start" if phase is first else _bucket(phase.name),
            "title": f"{phase.name}, {duration(phase.seconds)}"
            + (f": {phase.reason}" if phase.reason else ""),
        }
        for phase in shown
        if phase.end > phase.start
    ]
    return {
        "bars": bars,
        "lanes": [(i * LANE + LANE / 2, f"attempt {a}" if a else "before") for i, a in enumerate(lanes)],
        "axis": axis,
    }


def _plan(plan: dict[str, Any]) -> dict[str, Any]:
    chosen = dict(plan.get("chosen") or {})
    text = chosen.pop("text", None) or " ".join(f"{key} {value}" for key, value in chosen.items())
    reasons = Counter(str(r.get("reason")) for r in plan.get("rejected") or ())
    candidates = list(plan.get("candidates") or ())
    return {
        "chosen": text,
        "degrees": chosen,
        "candidates": candidates[:LAYOUTS_SHOWN],
        "more": max(0, len(candidates) - LAYOUTS_SHOWN),
        "rejected": reasons.most_common(LAYOUTS_SHOWN),
        "refused": sum(reasons.values()),
    }


def _compared(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return predicted and measured values, and measured over predicted."""
    rows = []
    for key, name, text_of in (
        ("step_seconds", "a step, in the median", duration),
        (UPDATE, "a step without its rollout", duration),
        ("tokens_per_second", f"{read_unit(summary['objective'])} per second", count),
        ("memory_bytes", "memory of a rank", size),
    ):
        if key not in summary["measured"]:
            continue
        predicted = summary["predicted"].get(key)
        measured = summary["measured"][key]
        ratio = measured / predicted if predicted and measured is not None else None
        rows.append(
            {"name": name, "predicted": text_of(predicted), "measured": text_of(measured), "ratio": ratio}
        )
    return rows


def _audit(audit: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the predicted and the measured step as two bars of the same parts."""
    sides = ("predicted", "measured")
    bars = charts.stacked([{part: pair[side] for part, pair in audit.items()} for side in sides], 430.0)
    return [{"side": side, "segments": segments} for side, segments in zip(sides, bars, strict=False)]


def _memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return each rank's memory, predicted and measured, and the composition of the largest; empty if unknown."""
    if not memory:
        return {}
    pairs = list(zip(memory["predicted_by_rank"], memory["measured_by_rank"], strict=True))
    ranks = [
        {
            "rank": rank,
            "predicted": size(predicted),
            "measured": size(measured),
            "ratio": measured / predicted if predicted else None,
        }
        for rank, (predicted, measured) in enumerate(pairs[:RANKS_SHOWN])
    ]
    error = memory["formula_error"]
    parts = [(name, size(value)) for name, value in (memory.get("parts") or {}).items() if value]
    return {
        "source": "the program, traced" if memory["source"] == "trace" else "a closed formula",
        "ranks": ranks,
        "more": len(pairs) - len(ranks),
        "rank": memory.get("rank"),
        "parts": parts,
        "formula": "" if error is None else f"{error:+.0%}",
    }


def _commits(run_dir: RunDir) -> list[dict[str, Any]]:
    store = Store(run_dir.commits)
    result = []
    for step in store.steps():
        try:
            manifest = store.manifest(step)
        except CorruptCommit as damage:
            result.append({"step": step, "damage": str(damage)})
        else:
            result.append(
                {
                    "step": step,
                    "damage": "",
                    "created": manifest.created,
                    "bytes": manifest.total_bytes,
                    "tensors": len(manifest.tensors),
                    "position": manifest.position,
                    "receipt": manifest.receipt,
                }
            )
    return result


def _events(events: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the latest events, newest first, with the seconds since the first event."""
    first = float(events[0].get("time") or 0.0) if events else 0.0
    return [
        {
            "after": max(0.0, (event.get("time") or first) - first),
            "attempt": event.get("attempt") or "",
            "phase": str(event.get("phase")),
            "bucket": _bucket(str(event.get("phase"))),
            "step": "" if event.get("step") is None else event["step"],
            "reason": event.get("reason") or "",
            "layout": _layout(event.get("layout_after")),
            "fault": event.get("first_fault") or "",
            "hint": event.get("explained") or "",
            "output": [str(line) for line in event.get("output") or ()],
            "lost": event.get("lost_steps") or 0,
        }
        for event in reversed(events[-EVENTS_SHOWN:])
    ]


def _bucket(phase: str) -> str:
    """Return the bucket whose colour stands for a phase. done, failed and stopped have their own colours."""
    return BUCKET_OF.get(phase, phase if phase in BUCKETS or phase in ENDED else "idle")


def _layout(layout: Any) -> str:
    return json.dumps(layout) if isinstance(layout, dict) else str(layout or "")

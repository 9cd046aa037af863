"""The content of status.json: phase, step, time left, goodput and ranks of a run, for people and for `status`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from cluster.workers.clock import wall
from cluster.workers.gang import RankStatus
from orchestrator.config.metric_names import parts_of_loss
from orchestrator.config.outcome import ENDED
from orchestrator.config.redact import redact_message
from orchestrator.controller.eta import eta_seconds, evaluation_seconds
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import State
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.observe.formatting import work_text
from orchestrator.observe.step_parts import StepParts, latest, why_slow
from orchestrator.storage.row_line import Row

EVENTS_SHOWN = 3
"""Events in status.json."""


def status_of(
    name: str,
    objective: str,
    steps: int,
    evaluate: EvaluateSpec | None,
    state: State,
    history: RunHistory | None,
    ranks: tuple[RankStatus, ...],
    until: int,
    note: str,
    evaluation: str = "",
    rollout_workers: Sequence[RankStatus] = (),
    processes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of status.json.

    Args:
        name: the name of the job.
        objective: the job's objective.
        steps: steps of the run.
        evaluate: what the job evaluates.
        state: the state of the run.
        history: the record of the run, None before it is open.
        ranks: the ranks that run.
        until: the last step to train to, which gives the remaining time.
        note: what the controller does at present, for people.
        evaluation: the background evaluation, as text for people.
        rollout_workers: the rollout workers.
        processes: the controller's process and its ancestors, see `process_identity.lineage`.
    """
    work = next((rank.work for rank in ranks if rank.work), None)
    step_seconds = history.step_seconds if history else 0.0
    last_evaluation = (history.files.evaluations.latest if history else None) or {}
    rows = history.files.recent if history else ()
    last = rows[-1] if rows else {}
    recent = latest(rows)
    parts = StepParts(recent)
    return {
        "name": name,
        "objective": objective,
        "phase": state.phase,
        "step": state.step,
        "steps": steps,
        "attempt": state.attempt,
        "layout": str(state.layout) if state.layout else None,
        "loss": last.get("loss"),
        "loss_parts": parts_of_loss(last),
        "reward": last.get("reward"),
        "sparsity": last.get("sparsity"),
        "open_heads": last.get("open_heads"),
        "tokens_per_second": last.get("tokens_per_second"),
        "mfu": last.get("mfu"),
        "step_parts": parts.means,
        "why_slow": why_slow(parts, recent),
        "validation": _validation(history) if history else None,
        "memory_bytes": last.get("memory_bytes"),
        "predicted_memory_bytes": history.predicted_memory if history else None,
        "goodput": _goodput(history) if history else None,
        "usd": history.spending.spent[1] or None if history else None,
        "latest_events": [_shown(event) for event in history.events[-EVENTS_SHOWN:]] if history else [],
        "eta_seconds": eta_seconds(
            state,
            until,
            step_seconds,
            evaluation_seconds(
                evaluate,
                state.step,
                until=until,
                last_step=steps,
                latest=last_evaluation.get("seconds"),
                work=work,
            ),
        ),
        "note": redact_message(note),
        "evaluation": "; ".join(filter(None, [work_text(work) if work else "", evaluation])),
        "missing_rows": history.event_history.missing if history else [],
        "rows": history.files.metrics.mark if history else None,
        "events": history.files.events_stored if history else 0,
        "time": time.time(),
        "pid": os.getpid(),
        "processes": list(processes),
        "memory_percent": psutil.virtual_memory().percent,
        "nodes": history.files.nodes.latest if history else {},
        "ranks": [
            {
                "rank": r.rank,
                "node": r.node,
                "pid": r.pid,
                "state": r.state,
                "step": r.step,
                "doing": r.activity,
            }
            for r in ranks
        ],
        "rollout_workers": [{"node": r.node, "pid": r.pid, "state": r.state} for r in rollout_workers],
    }


def _validation(history: RunHistory) -> dict[str, Any] | None:
    """The step and the losses of the last evaluation that this controller stored."""
    row = history.files.evaluations.latest
    if row is None:
        return None
    losses = {name: metrics["loss"] for name, metrics in row["sets"].items() if "loss" in metrics}
    return {"step": row["step"], "loss": losses} if losses else None


def _goodput(history: RunHistory) -> float | None:
    """An estimate of the share of the run's time that went into its steps. The summary has it exactly."""
    events = history.events
    until = events[-1]["time"] if events and events[-1]["phase"] in ENDED else wall()
    passed = until - events[0]["time"] if events else 0.0
    # Like the ledger, it leaves out the time for which the run had ended.
    for before, after in itertools.pairwise(events):
        passed -= after["time"] - before["time"] if before["phase"] in ENDED else 0.0
    return min(history.step * history.step_seconds / passed, 1.0) if passed > 0 and history.step else None


def _shown(event: Row) -> dict[str, Any]:
    fault = event.get("first_fault")
    return {
        "time": event["time"],
        "phase": event["phase"],
        "reason": f"{event.get('reason')}: {fault}" if fault else event.get("reason"),
    }

"""Collect the state of a chain from the run directories of its stages, for chain.json, the report and MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.chain.measured_exports import rows_of, shares, shortfall
from orchestrator.chain.stage_run import StageRun
from orchestrator.chain.vocabulary import facts_of, shown
from orchestrator.config.chain import MODEL, ChainSpec, Input
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.redact import redact_message
from orchestrator.controller.events import EventHistory
from orchestrator.controller.finish import draw
from orchestrator.observe.last_status import LOST, ControllerState, controller_state, last_status, state_of
from orchestrator.observe.last_status import WAITING as WAITS
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import ORIGIN, RunDir

WAITING = "not begun"
"""The state of a stage without a run."""
UNREADABLE = "unreadable"
"""The state of a stage whose run directory cannot be read."""


def record(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, lines: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the content of chain.json.

    Args:
        chain: the chain.
        stages: its stages, by name.
        root: its directory.
        lines: why stages ended whose run directories do not say so, by name. None if no command drives the chain; the
            reasons in the present chain.json count then.
    """
    before = root.read_json_or_empty(CHAIN)
    at_work = lines is not None
    if lines is None:
        failed = [each for each in before.get("stages") or () if each["state"] == Outcome.FAILED]
        lines = {each["stage"]: each["reason"] for each in failed}
    result = [_stage_or_why(stage, lines.get(name, "")) for name, stage in stages.items()]
    kept = shares(chain, root)
    for each in result:
        each["share"] = kept.get(each["stage"])
        if each["state"] == Outcome.DONE and (why := shortfall(chain, root, each["stage"])):
            each["state"] = str(Outcome.FAILED)
            each["reason"] = why
    for each in result:  # a stage that can never begin gets the reason
        unfit = [other["stage"] for other in result if other["stage"] in each["needs"] and _is_over(other)]
        if each["state"] == WAITING and not each["reason"] and unfit:
            each["reason"] = f"needs {', '.join(unfit)}"
    begun = [each["started"] for each in result if each["started"]]
    costs = [each["cost_usd"] for each in result if each["cost_usd"] is not None]
    return {
        "name": chain.name,
        "state": _state(result),
        "started": before.get("started") or min(begun, default=time.time()),
        "ended": None if at_work else before.get("ended"),
        "cost_usd": sum(costs) if costs else None,
        "worker_hours": sum(each["worker_hours"] for each in result),
        "stages": result,
        "exports": rows_of(chain, root),
    }


def _stage_or_why(stage: StageRun, line: str) -> dict[str, Any]:
    """As `_stage`. If the run directory cannot be read, the reason says why, and the other stages are still shown."""
    try:
        return _folder(stage, line) if stage.stage.vocabulary else _stage(stage, line)
    except (InputError, OSError, LookupError, TypeError, ValueError) as error:
        says = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return _about(stage, UNREADABLE, redact_message(" ".join(says.split())))


def _about(stage: StageRun, state: str, reason: str) -> dict[str, Any]:
    """The entry of a stage without its run directory."""
    base = stage.stage.begins_with or stage.stage.continues or stage.stage.made_of
    return {
        "stage": stage.name,
        "run_dir": stage.run.uri,
        "state": state,
        "reason": reason,
        "needs": list(stage.stage.needs),
        "begins_with": {"stage": base.stage, "tag": _tag(base), "step": None} if base else None,
        "model": stage.job.workload.model,
        "objective": stage.job.workload.objective,
        "step": 0,
        "steps": 0 if stage.stage.vocabulary else stage.job.train.steps,
        "loss": None,
        "evaluation": {},
        "started": None,
        "ended": None,
        "worker_hours": 0.0,
        "cost_usd": None,
        "receipt": None,
    }


def _tag(base: Input) -> str:
    """What of a stage another one begins with."""
    return "export" if base.key == MODEL else base.tag


def _folder(stage: StageRun, line: str) -> dict[str, Any]:
    """The entry of a stage that removes tokens."""
    made = facts_of(stage)
    if not made:
        status = {} if line else last_status(stage.run)
        if not status.get("phase"):
            return _about(stage, str(Outcome.FAILED) if line else WAITING, line)
        is_silent = controller_state(status) is ControllerState.SILENT
        why = f"its command is {status['controller']}" if is_silent else status["note"]
        return _about(stage, state_of(status), why) | {"started": status["started"]}
    return _about(stage, str(Outcome.DONE), "") | shown(made)


def _stage(stage: StageRun, line: str) -> dict[str, Any]:
    """The entry of a stage from its run directory. Raises InputError, OSError, or errors about wrong types."""
    run = stage.run
    status = last_status(run)
    summary = run.read_json_or_empty("summary.json")
    phase = status.get("phase")
    ended = bool(summary) and phase in (None, *ENDED)
    begun_state = state_of(status) if phase else (Outcome.FAILED if line else WAITING)
    state = summary["state"] if ended else begun_state
    match controller_state(status):
        case ControllerState.GONE if not ended:
            line = status["note"]
        case ControllerState.SILENT:
            line = f"its controller is {status['controller']}"
    base = stage.stage.begins_with or stage.stage.continues
    begun = run.read_json(ORIGIN) or {} if stage.stage.continues else _base(run) if base else {}
    evaluation = summary.get("evaluation") or {}
    about = _about(stage, str(state), (summary.get("reason") if ended else None) or ("" if ended else line))
    if about["begins_with"]:
        about["begins_with"]["step"] = begun.get("step")
    return about | {
        "step": (summary if ended else status).get("step") or 0,
        "loss": (summary.get("final_loss") if ended else status.get("loss")),
        "evaluation": dict(evaluation.get("sets") or {}),
        "started": summary.get("started") or _started(run),
        "ended": summary.get("ended") if ended else None,
        "worker_hours": summary.get("worker_hours") or 0.0,
        "cost_usd": summary.get("cost_usd"),
        "receipt": summary.get("receipt"),
    }


def _base(run: RunDir) -> Mapping[str, Any]:
    return EventHistory(run.rows(EVENTS)).base


def _started(run: RunDir) -> float | None:
    first = next(iter(run.log(EVENTS).rows()), None)
    return first["time"] if first else None


def _is_over(stage: Mapping[str, Any]) -> bool:
    """Whether a stage has ended without success."""
    return stage["state"] in ENDED and stage["state"] != Outcome.DONE


def _state(stages: list[dict[str, Any]]) -> str:
    """The state of a chain with these stages."""
    states = {stage["state"] for stage in stages}
    if states == {Outcome.DONE}:
        return str(Outcome.DONE)
    if working := states - {WAITING, UNREADABLE, LOST} - ENDED:
        return WAITS if working == {WAITS} else "running"
    for outcome in (LOST, Outcome.FAILED, Outcome.STOPPED):
        if outcome in states:
            return str(outcome)
    return "running" if Outcome.DONE in states else WAITING


def finish(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, progress: dict[str, Any]
) -> dict[str, Any]:
    """Write chain.json and report.html, bring MLflow up to date, and return the content of chain.json."""
    from orchestrator.chain.mlflow_chain import publish

    root.write_json(CHAIN, progress)
    progress["problem"] = draw(root, _report)
    progress["tracking"] = publish(chain, stages, root, progress)
    root.write_json(CHAIN, progress)
    return progress


def _report(root: RunDir) -> str:
    from orchestrator.observe.pages.chain_report import report

    return report(root)

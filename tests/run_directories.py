"""Run directories as they are while a run trains and after it, written here without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import job

from orchestrator.config.spec import dump, parse
from orchestrator.storage.run_directory import RunDir

START = 1_700_000_000.0


def run_of(
    folder: Path,
    phase: str = "done",
    losses: tuple[float, ...] = (4.0, 3.0, 2.0),
    seen: float = START,
    *,
    seed: int = 3,
    **train: Any,
) -> RunDir:
    """A run directory with a row for each loss, and an evaluation after the last. Its status was written at `seen`."""
    run = RunDir(str(folder))
    run.create()
    run.write_text("job.yaml", dump(parse(job("corpus.txt", **train) | {"name": folder.name, "seed": seed})))
    events: list[dict[str, Any]] = [{"time": START, "attempt": 1, "phase": "train"}]
    events += [{"time": START + 9, "attempt": 1, "phase": phase}] if phase == "done" else []
    run.append("events.jsonl", events)
    for step, loss in enumerate(losses, 1):
        row: dict[str, Any] = {
            "step": step,
            "attempt": 1,
            "time": START + step,
            "step_seconds": 1.0,
            "loss": loss,
            "forward_seconds": 0.3,
            "backward_seconds": 0.5,
        }
        if step == len(losses):
            sets = {"wiki": {"loss": loss + 0.5}}
            row["evaluations"] = [{"step": step, "attempt": 1, "time": START, "seconds": 1.0, "sets": sets}]
        run.append("metrics.jsonl", [row])
    status = {"phase": phase, "step": len(losses), "steps": 9, "time": seen, "loss": losses[-1]}
    run.write_json("status.json", status)
    return run

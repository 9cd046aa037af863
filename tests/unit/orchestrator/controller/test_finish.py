"""The end of a run: what its summary says."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import MEASURED
from orchestrator.config.spec import parse
from orchestrator.controller.finish import best_without_commit
from orchestrator.observe.console import facts
from orchestrator.observe.totals import RunTotals
from orchestrator.storage.run_directory import RunDir

WHOLE, FEW = {"batches": None, "averaged": 0}, {"batches": 1, "averaged": 0}


@pytest.mark.parametrize(
    ("metric", "values", "line"),
    [
        (
            "loss",
            {10: 3.0, 14: 2.0, 20: 2.5},
            "held.loss was best at step 14 (2), which has no commit: the best",
        ),
        (
            "accuracy",
            {10: 0.1, 14: 0.3, 20: 0.2},
            "held.accuracy was best at step 14 (0.3), which has no commit",
        ),
        ("loss", {10: 3.0, 14: 2.5, 20: 2.5}, None),
        ("loss", {10: 3.0, 14: float("nan"), 20: 2.5}, None),
    ],
)
def test_a_better_value_without_a_commit_is_told(
    tmp_path: Path, metric: str, values: dict[int, float], line: str | None
) -> None:
    document = job("none.txt")
    document["checkpoint"]["keep_best"] = f"held.{metric}"
    document["evaluate"] = {"sets": {"held": {"sources": [{"uri": "none"}]}}}
    spec, run, totals = parse(document), RunDir(str(tmp_path)), RunTotals([])
    store = Store(run.commits)
    assert best_without_commit(spec.checkpoint, spec.evaluate, run, totals) is None
    for step in (10, 20):
        told = {"evaluation": {f"held.{metric}": values[step]}, "last_evaluation_step": step, MEASURED: WHOLE}
        store.publish(step, store.write_raw(step, 0, []), {"position": 0, "receipt": "", **told})
    rows = [
        {"step": step, "sets": {"held": {metric: value}}, MEASURED: WHOLE} for step, value in values.items()
    ]
    totals.evaluations = [
        *rows[::-1],
        {"step": 5, "sets": {"held": {metric: values[20] * 1e9}}, MEASURED: FEW},
    ]
    totals.evaluations.append({"step": 5, "sets": {"held": {metric: 0.0}}, MEASURED: FEW})
    found = best_without_commit(spec.checkpoint, spec.evaluate, run, totals)
    assert (found or "").startswith(line or "")
    assert (found is None) == (line is None)
    shown = [text for name, text in facts({"best_without_commit": found}) if name == "best"]
    assert shown == ([found] if found else [])

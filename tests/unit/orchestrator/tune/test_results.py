"""What sweep.json holds of a search."""

from __future__ import annotations

import math
from pathlib import Path

from jobs import job

from orchestrator.config.spec import parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.results import summarise
from orchestrator.tune.trial_records import TrialRecords


def test_a_trial_that_has_not_ended_is_told_with_its_last_result(tmp_path: Path) -> None:
    """As the best of the search may be one: it stands in the table with the value that it is the best by."""
    spec = parse(job("a.txt") | {"tune": {"space": {"seed": {"choice": [1, 2]}}, "trials": 3}})
    sweep = RunDir(str(tmp_path))
    records = TrialRecords(sweep)
    names = records.draw([{"seed": 1}, {"seed": 2}, {"seed": 1}])
    for name, value in zip(names, (2.0, math.inf), strict=False):
        records.report(
            {"trial": name, "run": name, "step": 10, "value": value, "own_steps": 10, "cost_usd": 0.0}, 0.1
        )
    found = summarise(
        spec.name,
        spec.tune,
        sweep,
        records,
        SearchProgress(
            spec.tune, spec.train.steps, sweep, records=records, wanted=3, hours=0.0, show=lambda state: None
        ),
    )
    told = [(trial["state"], trial["step"], trial["value"]) for trial in found["trials"]]
    assert told == [("not ended", 10, 2.0), ("not ended", 10, None), ("not ended", 0, None)]
    assert (found["best"]["trial"], found["best"]["value"]) == ("0000", 2.0)

"""What sweep.json holds of a search."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import optuna
import pytest
from jobs import job

from orchestrator.config.spec import parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.results import frontier, summarise
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


@pytest.mark.parametrize("directions", [("min", "min"), ("min", "max"), ("max", "min"), ("max", "max")])
def test_the_frontier_is_that_of_optuna(directions: tuple[str, str]) -> None:
    """The values are whole numbers, so that some are equal: of equal trials the first is named."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    source = random.Random(3)
    for _ in range(20):
        values = [(float(source.randint(0, 9)), float(source.randint(0, 9))) for _ in range(12)]
        trials: list[dict[str, Any]] = [
            {"trial": f"{number:04d}", "state": "done", "value": first, "second": second}
            for number, (first, second) in enumerate(values)
        ]
        study = optuna.create_study(
            directions=["minimize" if each == "min" else "maximize" for each in directions]
        )
        study.add_trials([optuna.trial.create_trial(values=each) for each in values])
        left_out: list[dict[str, Any]] = [
            {"trial": "a", "state": "failed", "value": -99.0, "second": -99.0},
            {"trial": "b", "state": "done", "value": None, "second": -99.0},
            {"trial": "c", "state": "not ended", "value": -99.0, "second": None},
        ]
        kept = frontier([*trials, *left_out], directions)
        assert [values[int(name)] for name in kept] == sorted(
            {tuple(each.values) for each in study.best_trials}, reverse=directions[0] == "max"
        )
        assert all(int(name) == values.index(values[int(name)]) for name in kept)

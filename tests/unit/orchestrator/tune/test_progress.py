"""Where a search stands: limits, the best trial, and what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator import spec
from orchestrator.rundir import RunDir
from orchestrator.tune.console import line
from orchestrator.tune.ledger import Ledger
from orchestrator.tune.progress import Standing


def standing(folder: Path, before: float = 0.0, **limits: Any) -> tuple[Standing, Ledger]:
    job = spec.parse(
        {
            "name": "small",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
            "train": {"steps": 90, "global_batch": 8},
            "tune": {
                "space": {"seed": {"choice": [1, 2, 3]}},
                "trials": 3,
                "scheduler": "asha",
                "limits": limits,
            },
        }
    )
    ledger = Ledger(RunDir(str(folder)))
    ledger.draw([{"seed": 1}, {"seed": 2}, {"seed": 3}])
    return Standing(job, RunDir(str(folder)), ledger, 3, before, lambda told: None), ledger


def result(trial: str, step: int, value: float, **more: Any) -> dict[str, Any]:
    told = {"trial": trial, "run": trial, "step": step, "value": value, "own_steps": step, "cost_usd": 0.5}
    return told | {"failed": "", "limited": False, "finished": step >= 90, "done": True, **more}


def test_trials_end_done_stopped_or_failed(tmp_path: Path) -> None:
    found, ledger = standing(tmp_path)
    for told in (
        result("0000", 90, 2.0),
        result("0001", 10, 5.0),
        result("0002", 0, float("inf"), failed="no room"),
    ):
        found.heard(told)
        found.ended(told["trial"], told)
    assert {name: (e.state, e.step) for name, e in ledger.ended.items()} == {
        "0000": ("done", 90), "0001": ("stopped", 10), "0002": ("failed", 0),
    }  # fmt: skip
    assert ledger.ended["0001"].reason == "stopped by asha"
    assert ledger.ended["0002"].reason == "no room"
    assert found.best() == {"trial": "0000", "run": "0000", "step": 90, "value": 2.0}
    assert line(found.to_json()) == "3 of 3 trials ended (1 failed)  best 2.0000 (0000, step 90)  100 steps"


def test_a_trial_that_a_limit_of_the_search_cut_short_has_not_ended(tmp_path: Path) -> None:
    found, ledger = standing(tmp_path, steps=100)
    found.heard(result("0000", 90, 2.0))
    assert found.limit() == ""
    found.ended("0000", result("0000", 90, 2.0))
    found.heard(result("0001", 10, 5.0))
    assert found.limit() == "tune.limits.steps 100 is reached"
    found.ended("0001", result("0001", 10, 5.0))
    assert list(ledger.ended) == ["0000"]


def test_hours_of_earlier_commands_and_costs_count(tmp_path: Path) -> None:
    found, _ = standing(tmp_path, before=2.0, hours=2.0)
    assert found.limit() == "tune.limits.hours 2 is reached"


def test_costs_are_summed_over_runs(tmp_path: Path) -> None:
    found, _ = standing(tmp_path, cost_usd=1.0)
    found.heard(result("0000", 10, 5.0))
    found.heard(result("0000", 30, 4.0))
    assert found.limit() == ""
    found.heard(result("0001", 10, 5.0))
    assert found.limit() == "tune.limits.cost_usd 1 is reached"

"""Where a search stands: limits, the best trial, and what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import spec
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import progress
from orchestrator.tune.console import line
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.trial_records import TrialRecords


def job(**limits: Any) -> spec.JobSpec:
    return spec.parse(
        {
            "name": "small",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
            "train": {"steps": 90, "global_batch": 8},
            "limits": {"usd_per_worker_hour": 1.0},
            "tune": {
                "space": {"seed": {"choice": [1, 2, 3]}},
                "trials": 3,
                "scheduler": "asha",
                "limits": limits,
            },
        }
    )


def progress_of(folder: Path, before: float = 0.0, **limits: Any) -> tuple[SearchProgress, TrialRecords]:
    records = TrialRecords(RunDir(str(folder)))
    records.draw([{"seed": 1}, {"seed": 2}, {"seed": 3}][len(records.configs) :])
    spec = job(**limits)
    folders = RunDir(str(folder))
    progress = SearchProgress(
        spec.tune, spec.train.steps, folders, records=records, wanted=3, hours=before, show=lambda state: None
    )
    return progress, records


def result(trial: str, step: int, value: float, **more: Any) -> dict[str, Any]:
    found = {"trial": trial, "run": trial, "step": step, "value": value, "own_steps": step, "cost_usd": 0.5}
    return found | {"failed": "", "limited": False, "finished": step >= 90, "done": True, **more}


def test_trials_end_done_stopped_or_failed(tmp_path: Path) -> None:
    found, records = progress_of(tmp_path)
    for reported in (
        result("0000", 90, 2.0),
        result("0001", 10, 5.0),
        result("0002", 0, float("inf"), failed="no room"),
    ):
        found.on_result(reported)
        found.on_end(reported["trial"], reported)
    assert {name: (e.state, e.step) for name, e in records.ended.items()} == {
        "0000": ("done", 90), "0001": ("stopped", 10), "0002": ("failed", 0),
    }  # fmt: skip
    assert records.ended["0001"].reason == "stopped by asha"
    assert records.ended["0002"].reason == "no room"
    assert found.best() == {"trial": "0000", "run": "0000", "step": 90, "value": 2.0}
    assert line(found.to_json()) == "3 of 3 trials ended (1 failed)  best 2.0000 (0000, step 90)  100 steps"


def test_a_changed_file_ends_the_search_and_not_the_trial(tmp_path: Path) -> None:
    found, records = progress_of(tmp_path)
    reported = result("0001", 0, float("inf"), limited=True, changed="data.sources: is not the text")
    found.on_result(reported)
    found.on_end("0001", reported)
    assert found.limit() == "data.sources: is not the text"
    assert records.ended == {}
    assert found.best() is None


def test_what_has_failed_is_not_the_best_whatever_it_was_at_a_rung(tmp_path: Path) -> None:
    found, _ = progress_of(tmp_path)
    found.on_result(result("0000", 10, 1.0))
    found.on_result(result("0001", 10, 5.0))
    assert found.best() == {"trial": "0000", "run": "0000", "step": 10, "value": 1.0}
    found.on_end("0000", result("0000", 10, float("inf"), failed="no room"))
    assert found.best() == {"trial": "0001", "run": "0001", "step": 10, "value": 5.0}


def test_a_trial_runs_from_its_start_on_and_until_it_has_ended(tmp_path: Path) -> None:
    found, _ = progress_of(tmp_path)
    found.tick({"0000", "0001"})
    assert found.to_json()["running"] == ["0000", "0001"]
    found.on_result(result("0000", 90, 2.0))
    found.on_end("0000", result("0000", 90, 2.0))
    found.tick({"0000", "0001"})  # a search that goes on asks it again for what it had reported
    assert found.to_json()["running"] == ["0001"]


def test_a_trial_that_a_limit_of_the_search_cut_short_has_not_ended(tmp_path: Path) -> None:
    found, records = progress_of(tmp_path, steps=100)
    found.on_result(result("0000", 90, 2.0))
    assert found.limit() == ""
    found.on_end("0000", result("0000", 90, 2.0))
    found.on_result(result("0001", 10, 5.0))
    assert found.limit() == "tune.limits.steps 100 is reached"
    found.on_end("0001", result("0001", 10, 5.0))
    assert list(records.ended) == ["0000"]


def test_the_start_of_a_search_counts_once_in_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    found, _ = progress_of(tmp_path)
    assert found.to_json()["eta_seconds"] is None
    run_of(tmp_path, "0000", 1, 10, hours=10 / 3600)  # a second a step, begun with the command
    rows = RunDir(str(tmp_path / "0000"))
    started = [{**row, "time": row["time"] + 600} for row in rows.rows("metrics.jsonl")]
    (tmp_path / "0000" / "metrics.jsonl").unlink()
    rows.append("metrics.jsonl", started)  # after ten minutes in which Ray was started and data prepared
    now[0] += 610
    found.on_result(result("0000", 10, 5.0))
    assert found.to_json()["eta_seconds"] == pytest.approx(3 * 90 - 10)
    now[0] += 20
    assert found.to_json()["eta_seconds"] == pytest.approx(3 * 90 - 30), "time that passes is time less"


def test_hours_of_earlier_commands_and_costs_count(tmp_path: Path) -> None:
    found, _ = progress_of(tmp_path, before=2.0, hours=2.0)
    assert found.limit() == "tune.limits.hours 2 is reached"


def test_costs_are_summed_over_runs(tmp_path: Path) -> None:
    found, _ = progress_of(tmp_path, cost_usd=1.0)
    found.on_result(result("0000", 10, 5.0))
    found.on_result(result("0000", 30, 4.0))
    assert found.limit() == ""
    found.on_result(result("0001", 10, 5.0))
    assert found.limit() == "tune.limits.cost_usd 1 is reached"


def run_of(folder: Path, name: str, first: int, last: int, hours: float = 0.5) -> None:
    """A run of a trial that was killed, after so many hours of two workers."""
    run = RunDir(str(folder / name))
    run.create()
    run.write_text("job.yaml", spec.dump(job(cost_usd=None)))
    seconds = hours * 3600 / (last - first + 1)
    row = {"attempt": 1, "step_seconds": seconds}
    run.append(
        "metrics.jsonl",
        [{"step": n, "time": 1e9 + (n - first + 1) * seconds, **row} for n in range(first, last + 1)],
    )
    start = {"time": 1e9, "attempt": 1, "phase": "start", "layout_after": "dp2 zero0 mb4"}
    run.append("events.jsonl", [start, {**start, "phase": "train", "time": 1e9 + 1}])


def test_a_search_that_goes_on_has_not_forgotten_what_it_has_spent(tmp_path: Path) -> None:
    """Results at rungs, steps after the last rung, and hours are counted again."""
    found, records = progress_of(tmp_path)
    found.on_result(result("0000", 30, 4.0))
    found.on_result(result("0001", 10, 5.0, cost_usd=2.0))
    records.record_hours(3.0)
    run_of(tmp_path, "0001", 1, 14)
    run_of(tmp_path, "0002", 1, 7)
    again, _ = progress_of(tmp_path, before=1.0, steps=51, cost_usd=3.6, hours=3.0)
    assert again.steps == 30 + 14 + 7
    assert again.cost == pytest.approx(0.5 + 2.0 + 1.0)
    assert 3.0 <= again.hours < 3.1
    assert again.best() == {"trial": "0000", "run": "0000", "step": 30, "value": 4.0}
    assert again.limit() == "tune.limits.steps 51 is reached"
    assert again.to_json()["eta_seconds"] is None, "nothing is new yet"


def test_a_failed_trial_has_spent_what_it_had_spent(tmp_path: Path) -> None:
    found, records = progress_of(tmp_path, steps=60)
    found.on_result(result("0000", 40, 4.0))
    failed = result("0000", 40, float("inf"), failed="its rank died", own_steps=0, cost_usd=0.0)
    found.on_result(failed)
    found.on_end("0000", failed)
    assert (found.steps, found.cost, records.ended["0000"].step) == (40, 0.5, 40)
    run_of(tmp_path, "0001", 1, 9)
    found.on_result(result("0001", 4, 5.0))
    found.on_end("0001", None)  # its process died
    assert (found.steps, records.ended["0001"].state) == (49, "failed")
    again, _ = progress_of(tmp_path)
    assert (again.steps, again.cost) == (found.steps, found.cost)


def test_what_a_trial_tells_again_of_an_earlier_rung_takes_nothing_back(tmp_path: Path) -> None:
    found, records = progress_of(tmp_path)
    found.on_result(result("0000", 90, 2.0))
    found.on_end("0000", result("0000", 90, 2.0))
    size = (tmp_path / "trials.jsonl").stat().st_size
    again, records = progress_of(tmp_path)
    for step in (10, 30, 90):
        again.on_result(result("0000", step, 2.0))
        assert again.steps == 90
    assert records.reported["0000"]["step"] == 90
    lines = (tmp_path / "trials.jsonl").read_text()[size:].splitlines()
    assert lines == [], "nothing is reported of a trial that has ended"


def test_hours_are_written_down_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "NOTE_EVERY", 0.0)
    found, _ = progress_of(tmp_path, before=2.0)
    found.tick(set())
    assert TrialRecords(RunDir(str(tmp_path))).hours > 2.0


def test_a_line_of_another_kind_is_no_trial(tmp_path: Path) -> None:
    progress_of(tmp_path)
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write(
            '3\n{"trial": "0009"}\n{"trial": "0008", "event": "ended", "time": 1}\n{"trial": 7, "event": "x"}\n'
        )
        file.write(
            '{"trial": "0007", "event": "told", "time": 1, "run": "0007"}\n{"trial": "0006", "event": "drawn"'
        )
    records = TrialRecords(RunDir(str(tmp_path)))
    assert (sorted(records.configs), records.ended, records.reported) == (["0000", "0001", "0002"], {}, {})

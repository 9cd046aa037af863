"""A run that reaches a ceiling: it is warned, commits, exports, lets go, and goes on once the ceiling is raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import job, orchestrator, rows, status, write_job, write_text

MORE = 25.0
"""Seconds for which the run may go on."""


@pytest.mark.slow
def test_a_run_stops_at_its_hours_with_a_commit_and_an_export_and_goes_on_when_they_are_raised(
    tmp_path: Path,
) -> None:
    document = job(write_text(tmp_path / "corpus"), steps=1_000_000)
    document["resources"]["workers"] = {"min": 1, "max": 1}
    document["checkpoint"] = {"every": 50, "keep": 3, "export": "hf"}
    path, run = write_job(tmp_path, document), tmp_path / "runs" / "small"
    first = orchestrator("run", path, "--until", 4, cwd=tmp_path)
    assert first.returncode == 3, first.stderr
    seconds = json.loads((run / "summary.json").read_text())["ledger"]["wall_seconds"]

    ceiling = round((seconds + MORE) / 3600, 5)
    words = ["run", path, "--set", f"limits.hours={ceiling}"]
    done = orchestrator(*words, "--json", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)["summary"]
    step = summary["step"]
    assert (summary["state"], summary["reason"]) == ("stopped", f"limits.hours {ceiling:g} is reached")
    assert summary["commit"] == summary["export"]["step"] == step > 4
    assert (run / "export" / "model.safetensors").exists()
    assert status(run)["ranks"] == []
    told = [event["reason"] for event in rows(run, "events.jsonl")]
    warned = [n for n, reason in enumerate(told) if reason.startswith("80% of limits.hours")]
    assert len(warned) == 1
    assert warned[0] < told.index(f"limits.hours {ceiling:g} is reached")

    again = orchestrator(*words, cwd=tmp_path)
    assert again.returncode == 3, again.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, step + 1))
    raised = orchestrator("run", path, "--set", "limits.hours=9", "--until", step + 4, cwd=tmp_path)
    assert raised.returncode == 3, raised.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, step + 5))
    assert any(f"from the commit at step {step}" in e["reason"] for e in rows(run, "events.jsonl"))

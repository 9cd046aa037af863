"""The timeline of a pipeline as its ranks measure it, beside the planned one, in the report of a real run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from jobs import job, write_text
from local_run import drive_here

SCHEDULES = {
    "1f1b": {"F": 4, "B": 4},
    "zero_bubble": {"F": 8, "I": 8, "W": 8},
    "interleaved": {"F": 8, "B": 8},
}
"""What each rank does in a step of four micro-batches. A full backward pass may stand for its two halves."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_report_has_the_measured_pipeline_below_the_planned_one(schedule: str, tmp_path: Path) -> None:
    document, run = job(write_text(tmp_path, 20_000), steps=10), tmp_path / "run"
    document["parallel"] = {"pp": 2, "micro_batch": 2, "schedule": schedule}
    document["checkpoint"] = {"every": 10, "export": None}
    if schedule in ("zero_bubble", "interleaved"):
        document["workload"]["changes"] = {**document["workload"].get("changes", {}), "layers": 4}
    assert drive_here(document, str(run), tmp_path / "cache")["state"] == "done"
    for rank in (0, 1):
        told = json.loads((run / f"profiles/timeline/rank-{rank}.json").read_text())
        assert (told["attempt"], told["step"]) == (1, 8)
        counted = Counter(action[0] for action in told["actions"])
        if schedule == "zero_bubble":
            counted = Counter(
                {"F": counted["F"], "I": counted["I"] + counted["B"], "W": counted["W"] + counted["B"]}
            )
        assert counted == SCHEDULES[schedule]
        ends = [action[4] for action in told["actions"]]
        assert ends == sorted(ends)
    page = (run / "report.html").read_text()
    assert page.count('aria-label="timeline of the pipeline, ') == 2
    assert "measured" in page

"""The pipeline's timeline in the report: planned, and measured where all ranks have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.observe.pages.pipeline_timeline import timelines
from orchestrator.storage.run_directory import RunDir

PLAN: dict[str, Any] = {
    "attempt": 2,
    "chosen": {"pp": 2, "dp": 2, "tp": 1, "cp": 1},
    "timeline": [
        [0, "F", 0, 0, 0.0, 1.0],
        [1, "F", 1, 0, 1.0, 2.0],
        [1, "B", 1, 0, 2.0, 4.0],
        [0, "B", 0, 0, 4.0, 6.0],
    ],
}  # fmt: skip


def record(folder: Path, rank: int, actions: list[Any], attempt: int = 2) -> None:
    place = folder / "profiles" / "timeline"
    place.mkdir(parents=True, exist_ok=True)
    told = {"attempt": attempt, "step": 8, "actions": actions}
    (place / f"rank-{rank}.json").write_text(json.dumps(told))


def test_what_was_measured_stands_below_what_was_planned_on_one_scale(tmp_path: Path) -> None:
    record(tmp_path, 0, [["F", 0, 0, 0.5, 2.5], ["B", 0, 0, 8.5, 12.5]])
    record(tmp_path, 2, [["F", 1, 0, 2.5, 4.5], ["B", 1, 0, 4.5, 8.5]])  # the first rank of the second stage
    planned, real = timelines(RunDir(str(tmp_path)), PLAN)
    assert (planned["side"], planned["seconds"], planned["busy"]) == ("planned", 6.0, 3.0)
    assert (real["side"], real["seconds"], real["busy"]) == ("measured", 12.0, 6.0)
    assert [lane["rank"] for lane in real["lanes"]] == [0, 1]
    ends = [lane["bars"][-1]["x"] + lane["bars"][-1]["width"] for lane in real["lanes"]]
    assert ends[0] == 1040.0, "the longer one fills the width"
    widths = [one["lanes"][0]["bars"][0]["width"] for one in (planned, real)]
    assert widths == [81.33, 162.67], "a second is as wide in both"
    assert "backward pass of micro-batch 0, stage 1: 4.0 s" in real["lanes"][1]["bars"][1]["title"]


def test_without_all_ranks_of_this_attempt_nothing_was_measured(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    assert [one["side"] for one in timelines(run, PLAN)] == ["planned"]
    record(tmp_path, 0, [["F", 0, 0, 0.0, 1.0]])
    record(tmp_path, 2, [["F", 1, 0, 0.0, 1.0]], attempt=1)
    assert [one["side"] for one in timelines(run, PLAN)] == ["planned"]
    assert timelines(run, {**PLAN, "chosen": {"pp": 1}}) == []
    assert timelines(run, {}) == []

"""Predicted and measured parts of a step side by side, of one run and of a folder of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.observe.audit import audit, audit_of, memory_audit
from orchestrator.observe.pages.charts import stacked
from orchestrator.storage.run_directory import RunDir, runs_in

PLAN: dict[str, Any] = {
    "chosen": {"text": "dp2 zero0 mb4"},
    "machine": {"name": "h100"},
    "predicted": {
        "step_seconds": 2.0,
        "seconds_by_part": {"compute": 1.5, "communication": 0.5, "bubble": 0.0},
    },
}
MEANS = {"forward": 0.5, "backward": 1.0, "communication": 0.3, "agreement": 0.1, "other": 0.2}


def test_parts_stand_side_by_side() -> None:
    found = audit(PLAN, MEANS)
    assert found["compute"] == {"predicted": 1.5, "measured": 1.5}
    assert found["communication"] == {"predicted": 0.5, "measured": pytest.approx(0.4)}
    assert found["other"] == {"predicted": 0.0, "measured": 0.2}
    assert "bubble" not in found


def test_waiting_for_the_last_rank_is_a_part_of_its_own_where_it_is_known() -> None:
    said = {"compute": 1.5, "communication": 0.3, "stragglers": 0.2}
    plan = {"predicted": {"seconds_by_part": said}}
    told = audit(plan, MEANS, late=0.15)
    assert told["stragglers"] == {"predicted": 0.2, "measured": 0.15}
    assert told["communication"] == {"predicted": 0.3, "measured": pytest.approx(0.25)}
    assert audit(plan, MEANS, late=9.0)["communication"]["measured"] == 0.0
    untold = audit(plan, MEANS)
    assert untold["communication"] == {"predicted": 0.5, "measured": pytest.approx(0.4)}
    assert "stragglers" not in untold


def test_the_memory_of_each_rank_stands_beside_what_was_measured() -> None:
    plan: dict[str, Any] = {"predicted": {"memory_bytes_by_rank": [10, 6]}, "memory": {"source": "formula"}}
    found = memory_audit(plan, [11.0, 5.0])
    assert found["predicted_by_rank"] == [10, 6]
    assert found["measured_by_rank"] == [11.0, 5.0]
    assert (found["source"], found["formula_error"], "parts" in found) == ("formula", None, False)
    ranks = [
        {"rank": 0, "peak": 8, "at_peak": {"weights": 8}},
        {"rank": 1, "peak": 4, "at_peak": {"weights": 4}},
    ]
    plan["memory"] = {"source": "trace", "ranks": ranks, "formula_error": -0.2}
    found = memory_audit(plan, [11.0, 5.0])
    assert (found["source"], found["rank"], found["parts"]) == ("trace", 0, {"weights": 8})
    assert found["formula_error"] == -0.2
    assert memory_audit(plan, [11.0]) == memory_audit(plan, []) == memory_audit(None, [11.0]) == {}


@pytest.mark.parametrize("plan", [None, {}, {"predicted": {"step_seconds": 1.0}}])
def test_a_plan_of_an_earlier_version_is_not_compared(plan: dict[str, Any] | None) -> None:
    assert audit(plan, MEANS) == {}
    assert audit(PLAN, {}) == {}


def test_the_runs_of_a_folder(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "mine"))
    run.create()
    run.write_json("plan.json", PLAN)
    measured = {"step_seconds": 1.6, "memory_bytes": None}
    said = {"step_seconds": 2.0, "memory_bytes": 5}
    run.write_json("summary.json", {"name": "mine", "predicted": said, "measured": measured})
    (tmp_path / "_data").mkdir()
    (tmp_path / "other").mkdir()
    found = [audit_of(each) for each in runs_in(str(tmp_path))]
    assert len(found) == 2
    assert found[1] is None
    assert found[0] is not None
    assert found[0]["step_seconds"] == {"predicted": 2.0, "measured": 1.6, "ratio": pytest.approx(1.25)}
    assert found[0]["memory_bytes"]["ratio"] is None
    assert (found[0]["layout"], found[0]["machine"]) == ("dp2 zero0 mb4", "h100")


def test_bars_are_on_one_scale() -> None:
    predicted, measured = stacked([{"compute": 1.0, "bubble": 1.0}, {"compute": 3.0, "bubble": 1.0}], 100.0)
    assert [segment.width for segment in predicted] == [25.0, 25.0]
    assert [(segment.x, segment.width) for segment in measured] == [(0.0, 75.0), (75.0, 25.0)]
    assert stacked([{}, {}], 100.0) == []


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("summary.json", {"predicted": {"step_seconds": "fast"}}, "predicted.step_seconds"),
        ("summary.json", {"measured": {"step_seconds": float("nan")}}, "measured.step_seconds"),
        ("summary.json", {"measured": [1.0]}, "measured"),
        ("summary.json", {"audit": {"compute": 3}}, "audit.compute"),
        (
            "summary.json",
            {"memory_audit": {"predicted_by_rank": [], "measured_by_rank": [1]}},
            "predicted_by",
        ),
        (
            "summary.json",
            {"memory_audit": {"predicted_by_rank": [1], "measured_by_rank": "2"}},
            "measured_by",
        ),
        ("plan.json", {"chosen": {"text": 7}}, "chosen.text"),
        ("plan.json", {"machine": "h100"}, "machine"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, name: str, changes: dict[str, Any], where: str) -> None:
    run = RunDir(str(tmp_path / "mine"))
    run.create()
    figures = {"step_seconds": 2.0, "memory_bytes": 5}
    files = {"summary.json": {"name": "mine", "predicted": figures, "measured": figures}, "plan.json": PLAN}
    for each, value in files.items():
        run.write_json(each, value)
    assert audit_of(run)
    run.write_json(name, {**files[name], **changes})
    with pytest.raises(InputError, match=rf"{name}.*{where}"):
        audit_of(run)

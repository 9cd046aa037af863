"""What goes wrong on one rank ends all, at the same step, and is told."""

import time
from pathlib import Path
from typing import Any

from harness import MODELS, finished, run

from cluster.workers.process_gang import ProcessGang

LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}, {"cp": 2, "zero": 1}]


def case_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {**MODELS["decoder"], "id": "fault", "layout": {"micro_batch": 2, **layout}}


def test_nan_on_one_rank_stops_all_at_the_same_step(gang: ProcessGang) -> None:
    cases = [case_of(layout) for layout in LAYOUTS]
    results = finished(2, {"cases": cases}, "rank_faults:poisoned", gang)
    assert results == [[[2]] * len(LAYOUTS)] * 2


def test_a_rank_that_raises_leaves_nobody_hanging(tmp_path: Path, gang: ProcessGang) -> None:
    began = time.monotonic()
    errors = run(2, [case_of({"tp": 2})], tmp_path, gang, "rank_faults:raising")
    assert any("rank 1: ValueError: a kernel went wrong" in error for error in errors)
    assert time.monotonic() - began < 120

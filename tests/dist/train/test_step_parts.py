"""The parts of a step, as they are measured under layouts that wait for other ranks in different ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import finished
from jobs import job, write_text
from lasting_gang import LastingGang
from prepared import prepare_here

from orchestrator.config.spec import parse
from orchestrator.observe.step_parts import StepParts, why_slow
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import Task

CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dp2 zero3": ({"dp": 2, "zero": 3}, {"communication"}),
    "pp2": ({"pp": 2}, {"pipeline", "communication"}),
    "dp2": ({"dp": 2}, {"communication"}),
    "dp2 zero1": ({"dp": 2, "zero": 1}, {"communication"}),
    "tp2": ({"tp": 2}, {"communication"}),
    "cp2": ({"cp": 2}, {"communication"}),
}
QUICK = ("dp2 zero3", "pp2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_the_parts_of_a_step_are_measured(name: str, text: Path, tmp_path: Path, gang: LastingGang) -> None:
    degrees, waits = CASES[name]
    spec = parse(job(write_text(text, 20_000), steps=4))
    document, layout = spec.model_dump(mode="json"), Layout(micro_batch=2, **degrees).to_json()
    data = prepare_here(spec, str(text / "cache"))
    task = Task(
        document, layout, str(tmp_path), data, 1, None, 4, False, flops_per_token=1e6, peak_flops=1e12
    )
    rows, _ = finished(2, task.to_json(), "rank_tasks:timed", gang)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        parts = {
            key: row[f"{key}_seconds"] for key in ("forward", "backward", "optimizer", "agreement", *waits)
        }
        assert min(parts.values()) > 0, parts
        assert sum(parts.values()) + row["data_seconds"] <= row["step_seconds"]
        tokens = row["tokens_per_second"]
        assert row["model_flops_per_second"] == pytest.approx(1e6 * tokens)
        assert row["mfu"] == pytest.approx(1e6 * tokens / 2e12)
    parts = StepParts(rows[1:])
    print(name, {part: f"{seconds * 1e3:.1f} ms" for part, seconds in parts.means.items()})
    assert why_slow(parts, rows).startswith("a step takes ")

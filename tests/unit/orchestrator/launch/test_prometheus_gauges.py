"""Metrics for Prometheus: what a status says, under the names that are documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from orchestrator.launch import prometheus_gauges
from orchestrator.launch.prometheus_gauges import GAUGES, PARTS, RunMetrics


class Gauge:
    """Keeps what it is set to."""

    seen: ClassVar[dict[tuple[str, ...], float]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._keys)
        self.seen[(self._name, *(tags[key] for key in self._keys))] = value


def test_a_status_becomes_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_gauges, "Gauge", Gauge)
    monkeypatch.setattr(Gauge, "seen", {})
    metrics = RunMetrics("base")
    ranks: list[dict[str, Any]] = [{"state": "running"}, {"state": "dead"}]
    metrics.update(
        {"step": 4, "steps": 9, "loss": 2.5, "mfu": None, "ranks": ranks, "step_parts": {"data": 0.25}}
    )
    assert Gauge.seen == {
        ("orchestrator_step", "base"): 4.0,
        ("orchestrator_steps", "base"): 9.0,
        ("orchestrator_loss", "base"): 2.5,
        ("orchestrator_ranks", "base"): 1.0,
        ("orchestrator_failed", "base"): 0.0,
        (PARTS, "base", "data"): 0.25,
    }


@pytest.mark.parametrize(
    ("ended", "failed"),
    [
        ({"phase": "failed", "error": None}, 1.0),
        ({"phase": "train", "error": {"line": "the store is gone", "input": False}}, 1.0),
        ({"phase": "done", "error": None}, 0.0),
        ({"phase": "stopped", "error": None}, 0.0),
    ],
)
def test_a_run_that_has_failed_says_so(
    ended: dict[str, Any], failed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_gauges, "Gauge", Gauge)
    monkeypatch.setattr(Gauge, "seen", {})
    RunMetrics("base").update(ended)
    assert Gauge.seen[("orchestrator_failed", "base")] == failed


def test_the_guide_names_them_all() -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/mlflow.md").read_text()
    assert [name for name in (*GAUGES, PARTS) if f"`ray_{name}`" not in guide] == []

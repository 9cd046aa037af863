"""What the commands show of a chain."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cli.chain import show


def export(name: str, share: float, timed: bool) -> dict[str, Any]:
    speed = {"batch": 1, "p50_seconds": 0.0021, "p95_seconds": 0.003, "tokens_per_second": 30_000.0}
    return {
        "export": name, "metric": "accuracy", "metrics": {"accuracy": 0.8 * share}, "share": share,
        "parameters": 12_500_000, "weights_bytes": 12 * 2**20, "memory_bytes": 78 * 2**20,
        "speeds": [speed] if timed else [],
    }  # fmt: skip


@pytest.mark.parametrize("timed", [True, False])
def test_exports_are_shown_below_the_stages(timed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage that keeps too little ends a chain before all are timed."""
    chain: dict[str, Any] = {"name": "smaller", "state": "failed", "stages": [], "exports": []}
    show(chain)
    assert "weights" not in capsys.readouterr().out
    show(chain | {"exports": [export("teacher", 1.0, True), export("student", 0.95, timed)]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = next(line for line in lines if line[:1] == ["student"])
    measured = ["student", "0.76", "95.0", "%", "12.5M", "12", "MiB", "78", "MiB"]
    assert found == measured + (["2.1", "ms", "3", "ms", "30k"] if timed else [])

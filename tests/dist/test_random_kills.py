"""Random ranks and nodes are killed at random moments, and no finished step is done again."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import curve, job, weights, write_text
from simulated_nodes import run_on_nodes

KILLS = 20


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_no_finished_step_is_lost(tmp_path: Path, optimizer: str) -> None:
    """A row of metrics arrives once its step is held on two nodes, so that none arrives twice."""
    document = job(write_text(tmp_path / "corpus"), steps=40 * KILLS)
    document["train"]["optimizer"]["name"] = optimizer
    document["resources"] = {"workers": {"min": 2, "max": 2}}
    document["checkpoint"] = {"every": 10_000, "keep": 2, "snapshot_every": 1, "export": None}
    document["limits"] = {"restarts": 10 * KILLS}
    summary, gang, killer = run_on_nodes(
        document, str(tmp_path / "killed"), tmp_path / "cache", kills=KILLS, longest=0.15
    )
    assert summary["state"] == "done"
    assert len(killer.struck) == KILLS
    assert {kind for kind, _ in killer.struck} == {"rank", "node"}
    assert [step for step, count in gang.rows.items() if count > 1] == []
    # At most the step whose snapshot was under way is computed again.
    again = [before - after for before, after in zip(gang.reached, gang.restored[1:], strict=False)]
    assert max(again) <= 1
    run_on_nodes(document, str(tmp_path / "quiet"), tmp_path / "cache")
    assert curve(tmp_path / "killed") == curve(tmp_path / "quiet")
    steps = document["train"]["steps"]
    assert weights(tmp_path / "killed", steps) == weights(tmp_path / "quiet", steps)

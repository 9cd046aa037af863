"""A run that was taken back to an earlier commit makes the same bits again."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import curve, job, weights, write_text
from local_run import drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.controller import decide
from orchestrator.launch.rollback import roll_back
from orchestrator.storage.run_directory import RunDir


def test_a_run_that_went_back_makes_the_same_bits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    document, run = job(write_text(tmp_path, 20_000)), tmp_path / "run"
    drive_here(document, str(run), tmp_path / "cache")
    before, trained = curve(run), weights(run, 12)
    roll_back(RunDir(str(run)), 4)
    assert Store(str(run / "checkpoints")).steps() == [4]
    summary = drive_here(document, str(run), tmp_path / "cache")
    assert (summary["state"], summary["commit"]) == ("done", 12)
    assert curve(run) == before
    assert weights(run, 12) == trained

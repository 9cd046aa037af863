"""A range test on real ranks: the rates of its rows, what it finds, and that a loss of no number is a result."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from jobs import job, rows, write_text
from local_run import drive_here

from orchestrator.cli.lr_range import has_diverged, show
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.lr_range import RateRange, job_of_range


def test_rates_rise_in_a_run_and_one_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below 1e12 the weights overflow in some step: the run ends there, and the steps before are the result."""
    document = job(write_text(tmp_path / "text", 20_000))
    document["parallel"] = {"micro_batch": 4}
    document["train"]["optimizer"]["clip"] = None
    asked = RateRange(1e-5, 1e12, 40)
    made = job_of_range(parse(document).document(), asked)
    run = RunDir(str(tmp_path / made.name))
    summary = drive_here(made.document(), run.uri, tmp_path / "cache")
    assert summary["state"] == Outcome.FAILED
    assert has_diverged(run)
    found = rows(Path(run.uri))
    wanted = np.geomspace(asked.low, asked.high, asked.steps)
    assert [row["lr"] for row in found] == pytest.approx(list(wanted[: len(found)]))
    show(made.name, "causal_lm", run, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert len(said["rates"]) == len(found)
    assert said["diverged"] is not None
    assert said["diverged"] <= wanted[len(found)] * (1 + 1e-9)
    assert said["suggested"] is None or 1e-5 <= said["suggested"] < said["diverged"]
    assert math.isfinite(said["lowest"])
    assert "<svg" in (Path(run.uri) / "lr-range.html").read_text()

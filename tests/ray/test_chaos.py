"""Runs that are broken on purpose are the same runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job, orchestrator, write_text
from prepared import with_data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A job of 60 steps with a commit at every fifth."""
    document = with_data(job(write_text(tmp_path, 20_000), steps=60), tmp_path / "data")
    document["checkpoint"] = {"every": 5, "keep": 3, "export": None}
    document["tracking"] = None
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def chaos(path: Path, *words: object, timeout: float) -> tuple[int, list[dict[str, Any]], str]:
    done = orchestrator("chaos", path, "--json", *words, cwd=path.parent, timeout=timeout)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_lost_node_of_rank_0_changes_nothing(path: Path) -> None:
    code, verdicts, told = chaos(path, "--fault", "node@0:30", timeout=280)
    assert code == 0, (verdicts, told)
    (lost,) = verdicts
    assert (lost["fault"], lost["ended"], lost["receipt"], lost["held"]) == (
        "node@0:30",
        "done",
        "same",
        True,
    )
    assert lost["attempts"] >= 2
    assert lost["back_after"] is not None
    assert lost["left"] == []


def test_what_is_no_fault_is_told(path: Path) -> None:
    for word, said in (("melt@1:3", "choose from kill@RANK:STEP"), ("kill@7:3", "beyond the job's 60 steps")):
        done = orchestrator("chaos", path, "--fault", word, cwd=path.parent, timeout=60)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (path.parent / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_that_there_is(path: Path) -> None:
    code, verdicts, told = chaos(path, "--set", "train.steps=150", timeout=1700)
    killed = next(v for v in verdicts if v["fault"] == "kill@1:75")
    assert (killed["receipt"], killed["losses"], killed["attempts"]) == ("same", "same", 2)
    assert "exit code -9" in killed["first_fault"]
    assert [v["fault"] for v in verdicts if not v["held"]] == [], told
    assert code == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_hundreds_of_random_faults_lose_and_double_no_sample(path: Path) -> None:
    # Steps of 10 ms are seen ten at a time: three faults would be of the same step, which ends a run.
    words = ["--random", 200, "--seed", 11, "--set", "train.steps=1200", "--set", "train.global_batch=64"]
    code, (verdict,), told = chaos(path, *words, timeout=2900)
    assert code == 0, (verdict, told)
    assert verdict["missed"] == 0
    assert verdict["attempts"] >= 201
    assert verdict["receipt"] == "same"

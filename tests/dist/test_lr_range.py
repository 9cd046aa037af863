"""A range test on real ranks: the rates of its rows, what it finds, and that a loss of no number is a result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import job, rows, write_text
from local_run import controller_here, drive_here

from orchestrator.cli.lr_range import has_diverged, run_lr_range, show
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller import decide
from orchestrator.launch import start_run
from orchestrator.launch.watched_run import RunOutcome
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


RANGE = "1e-5:1e-1:24"


class Command:
    """The command on gangs of this process."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = place
        self.document = parse(job(write_text(place / "text", 20_000))).document()
        self.given: dict[str, Any] = {}
        monkeypatch.setattr(decide, "SETTLE", 0.0)
        monkeypatch.setattr(start_run, "run", self._drive)

    def run(
        self, name: str, faults: tuple[str, ...] = (), until: int | None = None, priority: int = 0
    ) -> Outcome:
        """Run a range test in a directory of this name."""
        self._faults, self._until = faults, until
        where = str(self._place / name)
        return run_lr_range(self.document, RANGE, where, None, priority=priority, how="off", as_json=True)

    def _drive(self, spec: JobSpec, run: RunDir, until: int | None, **given: Any) -> RunOutcome:
        assert until is None
        self.given = given
        made = controller_here(
            spec.document(), run.uri, self._place / "cache", faults=self._faults, until=self._until
        )
        summary = made.drive()
        return RunOutcome(Outcome(summary["state"]), summary, "why")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_a_killed_rank_changes_nothing_that_is_found(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.run("quiet", priority=7) == Outcome.DONE
    assert command.given["priority"] == 7
    quiet = json.loads(capsys.readouterr().out)
    assert command.run("killed", faults=("kill@1:15",)) == Outcome.DONE
    killed = json.loads(capsys.readouterr().out)
    assert {row["attempt"] for row in rows(tmp_path / "killed-lr-range")} == {2}
    assert killed.pop("run_dir") != quiet.pop("run_dir")
    assert killed == quiet
    assert len(quiet["rates"]) == 24


def test_a_stopped_test_shows_what_it_has_found(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """If that is a curve; the next one begins anew."""
    assert command.run("run", until=14) == Outcome.STOPPED
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["line"], len(found["rates"])) == (3, "why", 14)
    page = tmp_path / "run-lr-range" / "lr-range.html"
    assert page.exists()
    assert command.run("run", until=4) == Outcome.STOPPED
    assert json.loads(capsys.readouterr().out) == {
        "exit_code": 3,
        "line": "why",
        "run_dir": str(tmp_path / "run-lr-range"),
    }
    assert not page.exists()
    assert [row["step"] for row in rows(tmp_path / "run-lr-range")] == [1, 2, 3, 4]


def test_a_test_that_fails_is_a_failure(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At another cause than a loss that is no number, whatever rows there are."""
    command.document["limits"]["restarts"] = 0
    assert command.run("run", faults=("kill@1:20",)) == Outcome.FAILED
    said = json.loads(capsys.readouterr().out)
    assert said == {"exit_code": 1, "line": "why", "run_dir": str(tmp_path / "run-lr-range")}

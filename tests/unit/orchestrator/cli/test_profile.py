"""The command profile: what it refuses, and what it shows of results that are there."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text

from orchestrator.cli.app import call
from orchestrator.config.spec import dump, parse


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose run trains on two ranks."""
    (tmp_path / "job.yaml").write_text(dump(parse(job(write_text(tmp_path)))))
    (tmp_path / "events.jsonl").touch()
    status(tmp_path, "train")
    return tmp_path


def status(run: Path, phase: str) -> None:
    (run / "status.json").write_text(json.dumps({"phase": phase, "ranks": [{"rank": 0}, {"rank": 1}]}))


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        call(["profile", *map(str, arguments)])
    printed = capsys.readouterr()
    return int(str(end.value.code)), printed.out + printed.err


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ("0,x", "is not a list of ranks"),
        ("2", "the run has 2 ranks; name some of 0 to 1"),
        ("-1", "the run has 2 ranks"),
    ],
)
def test_ranks_that_there_are_not_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], ranks: str, line: str
) -> None:
    code, text = said(capsys, run, f"--ranks={ranks}")
    assert (code, line in text) == (2, True)
    assert not (run / "profiles").exists()


def test_a_run_that_does_not_train_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(run, "export")
    code, text = said(capsys, run)
    assert (
        code,
        f"{run}: the run does not train now: it is in phase export; wait for phase train" in text,
    ) == (2, True)
    status(run, "done")
    assert "it is in phase done; ask while it trains" in said(capsys, run)[1]


def test_what_comes_is_shown_and_what_does_not_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "aten::mm", "calls": 3, "cpu_seconds": 0.1, "device_seconds": 0.0, "whole_seconds": 0.1}
    found = {"steps": [4, 5], "seconds": 0.5, "files": ["rank-1.trace.json.gz"], "operators": [row]}

    def answer() -> None:
        while not (request := run / "profiles/request.json").exists():
            pass
        asked = json.loads(request.read_text())
        assert (asked["ranks"], asked["steps"]) == ([1], 2)
        folder = run / "profiles" / asked["id"]
        folder.mkdir()
        (folder / "rank-1.json").write_text(json.dumps({"rank": 1, "communication": [], **found}))

    rank = threading.Thread(target=answer, daemon=True)
    rank.start()
    code, text = said(capsys, run, "--ranks", "1", "--timeout", 30)
    assert code == 0
    for part in ("Rank 1, steps 4 to 5", "aten::mm", "100.0 ms", "20.0%", "rank-1.trace.json.gz"):
        assert part in text
    code, text = said(capsys, run, "--ranks", "0", "--timeout", 1)
    assert (code, "no profile of rank 0 within 1 s" in text) == (1, True)

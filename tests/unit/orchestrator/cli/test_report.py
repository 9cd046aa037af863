"""report, and what verify-resume says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.verify.replay import ReplayResult


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A finished run, to do with as one likes."""
    return Path(shutil.copytree(runs / "runs" / "small", tmp_path / "small"))


def test_a_report_is_drawn_anew(command: Any, run: Path) -> None:
    (run / "report.html").unlink()
    said = command("report", run)
    assert (said.code, said.out, said.err) == (0, f"{run}/report.html\n", "")
    assert "<svg" in (run / "report.html").read_text()


ROW = {"step": 5, "recorded": 0.1, "replayed": 0.1, "verdict": "same"}


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([ROW], 0, "1 steps replayed: receipts equal, losses equal to the last bit"),
        (
            [ROW, {**ROW, "step": 6, "replayed": 0.2, "verdict": "differs in loss"}],
            1,
            "the replay differs at step 6",
        ),
    ],
)
def test_a_verdict_is_shown(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], code: int, line: str
) -> None:
    asked = []
    monkeypatch.setattr(
        "orchestrator.verify.replay.replay",
        lambda *words, **_: asked.append(words[2:]) or ReplayResult(4, rows),
    )
    shown = command("verify-resume", run, "--steps", 2)
    assert shown.code == code
    assert shown.err == f"{line}\n"
    listed = command("verify-resume", run, "--step", 4, "--json")
    assert listed.code == code
    assert json.loads(listed.out)["same"] == (code == 0)
    assert asked == [(None, 2), (4, 5)]

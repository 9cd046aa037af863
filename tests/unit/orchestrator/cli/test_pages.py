"""The commands that show several runs: compare, serve and top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_directories import run_of

from orchestrator.cli.app import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_of(tmp_path / "runs" / "a")
    run_of(tmp_path / "runs" / "b", "train", (6.0, 4.0), steps=7)
    return tmp_path / "runs"


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        call([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return int(str(end.value.code)), printed.out + printed.err


def test_compare_prints_numbers_curves_and_differences(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder / "page.html"
    code, text = said(capsys, "compare", folder / "a", folder / "b", "--html", page)
    assert code == 0
    for part in ("loss of wiki", "4.5000", "█", "train.steps", "Job files differ in"):
        assert part in text
    assert "<svg" in page.read_text()
    code, text = said(capsys, "compare", folder / "a", folder / "b", "--json")
    found = json.loads(text)
    assert found["differences"]["train.steps"] == {"a": "12", "b": "7"}
    assert found["runs"]["b"]["state"] == "running"


def test_compare_refuses_one_run_and_a_page_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "compare", folder / "a")[0] == 2
    code, text = said(capsys, "compare", folder / "a", folder / "b", "--html", folder / "no" / "page.html")
    assert (code, "cannot be written" in text) == (2, True)


def test_top_shows_every_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, text = said(capsys, "top", folder)
    assert code == 0
    lines = [line.split()[:2] for line in text.splitlines() if line.strip()][2:]
    assert lines == [["b", "train,"], ["a", "done"]], "what trains is first, and says that it is silent"
    code, text = said(capsys, "top", folder, "--json")
    assert [row["name"] for row in json.loads(text)] == ["b", "a"]


@pytest.mark.parametrize("command", ["top", "serve"])
def test_a_folder_that_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, text = said(capsys, command, folder / "nowhere")
    assert (code, "there is no such folder" in text) == (2, True)

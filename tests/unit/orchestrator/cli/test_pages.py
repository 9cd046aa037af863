"""The commands that show several runs: compare, serve and top."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from run_directories import run_of

from orchestrator.cli.app import call
from orchestrator.observe.pages.page_server import PageServer
from orchestrator.observe.pages.runs_page import listed as listed_rows
from orchestrator.storage.run_directory import RunDir


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
    RunDir(str(folder / "b")).write_json("status.json", {"phase": "train", "time": time.time()})
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
    assert lines == [["b", "lost"], ["a", "done"]], "what has not ended is first"
    run_of(folder / "b", "train", (6.0, 4.0), seen=time.time() - 60, steps=7)
    assert "train, silent for 1 min" in said(capsys, "top", folder)[1]
    code, text = said(capsys, "top", folder, "--json")
    assert [row["name"] for row in json.loads(text)] == ["b", "a"]


def test_one_run_that_cannot_be_read_hides_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's job.yaml, as where a secret stands in it, is read as little as one of no text."""
    ls = LocalFileSystem.ls

    def listed(self: LocalFileSystem, path: str, **how: Any) -> Any:
        if path.endswith("theirs"):
            raise PermissionError(13, "Permission denied", path)
        return ls(self, path, **how)

    for name in ("binary", "status", "alone", "theirs"):
        run_of(folder / name)
    monkeypatch.setattr(LocalFileSystem, "ls", listed)
    (folder / "binary" / "job.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "status" / "status.json").write_text('{"phase": ["train"], "time": "yesterday"}')
    for file in ("status.json", "metrics.jsonl"):
        (folder / "alone" / file).unlink()
    (folder / "alone" / "job.yaml").unlink()
    (folder / "alone" / "job.yaml").mkdir()
    found = json.loads(said(capsys, "top", folder, "--json")[1])
    told = {row["name"]: (row["state"], row["says"]) for row in found}
    assert next(iter(told)) == "b", "what trains is first"
    assert told["a"] == ("done", "")
    assert told["binary"][0] == "done", "what can be read is"
    assert told["binary"][1].startswith(f"{folder}/binary/job.yaml: cannot be read")
    assert told["status"][0] == told["alone"][0] == "unreadable"
    assert "Is a directory" in told["alone"][1]
    server = PageServer(str(folder))
    rows = listed_rows(server.runs.find())
    assert {row["name"] for row in rows} == set(told) >= {"theirs", "b"}
    server._http.server_close()


@pytest.mark.parametrize("command", ["top", "serve"])
def test_a_folder_that_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, text = said(capsys, command, folder / "nowhere")
    assert (code, "there is no such folder" in text) == (2, True)

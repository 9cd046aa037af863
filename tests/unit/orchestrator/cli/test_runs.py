"""runs: run directories with their sizes, and the removal of those that nothing needs."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.api.run import load_run
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pins import hold
from orchestrator.config.errors import InputError
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """Three run directories, to do with as one likes: small is done, half was stopped, and again is a copy of small."""
    for name, of in (("small", "small"), ("half", "half"), ("again", "small")):
        shutil.copytree(runs / "runs" / of, tmp_path / "runs" / name)
    return tmp_path / "runs"


def listed(command: Any, folder: Path) -> dict[str, dict[str, Any]]:
    said = command("runs", folder, "--json")
    assert (said.code, said.err) == (0, "")
    return {row["name"]: row for row in json.loads(said.out)}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_runs_are_listed_with_their_sizes(command: Any, folder: Path) -> None:
    found = listed(command, folder)
    assert sorted(found) == ["again", "half", "small"]
    assert {name: (row["state"], row["step"], row["steps"]) for name, row in found.items()} == {
        "again": ("done", 12, 12),
        "half": ("stopped", 6, 12),
        "small": ("done", 12, 12),
    }
    for name, row in found.items():
        assert row["bytes"] == size(folder / name)
        assert row["checkpoint_bytes"] == size(folder / name / "checkpoints")
    lines = command("runs", folder).out.splitlines()
    assert [line.split()[:2] for line in lines if "/ 12" in line] == [
        ["again", "done"],
        ["half", "stopped"],
        ["small", "done"],
    ]


def test_one_that_cannot_be_read_hides_no_other(command: Any, folder: Path) -> None:
    (folder / "half/status.json").write_text('{"phase": "train", "step": "x", "time": 1.0}')
    found = listed(command, folder)
    assert (found["half"]["state"], found["small"]["state"]) == ("unreadable", "done")
    assert found["half"]["problem"].startswith("ValueError")


def test_a_run_is_removed_for_good(command: Any, folder: Path) -> None:
    before = size(folder / "again")
    said = command("runs", folder, "--remove", "again", "--yes", "--json")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == {"removed": [str(folder / "again")], "bytes": before}
    assert sorted(path.name for path in folder.iterdir()) == ["half", "small"]
    said = command("runs", folder, "--remove", folder / "small", "--remove", "half", "--yes")
    assert said.out.startswith("removed small, half: ")
    assert list(folder.iterdir()) == []


def test_it_asks_first(command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = command("runs", folder, "--remove", "again")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "asks first" in said.err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, left in ((False, True), (True, False)):
        monkeypatch.setattr("typer.confirm", lambda text, err, answer=answer: answer)
        said = command("runs", folder, "--remove", "again")
        assert (said.code, (folder / "again").exists()) == (0, left)
        assert ("nothing is removed" in said.err) is left


def test_a_run_at_work_is_not_removed(command: Any, folder: Path) -> None:
    status = json.loads((folder / "half/status.json").read_text())
    at_work = {"phase": "train", "time": time.time(), "processes": lineage()}
    (folder / "half/status.json").write_text(json.dumps(status | at_work))
    said = command("runs", folder, "--remove", "small", "--remove", "half", "--yes")
    assert said.code == 2
    assert f"{folder / 'half'}: a controller drives this run; `orchestrator stop` ends it" in said.err
    assert (folder / "small").exists(), "none is removed where one may not be"


def test_one_that_a_command_has_just_taken_up_is_not_removed(command: Any, folder: Path) -> None:
    with RunDir(str(folder / "half")).lock():
        said = command("runs", folder, "--remove", "half", "--yes")
    assert (said.code, (folder / "half/job.yaml").exists()) == (2, True)
    assert "a controller drives this run" in said.err


def test_python_removes_a_run_with_the_same_care(folder: Path) -> None:
    run = load_run(folder / "half")
    with RunDir(run.uri).lock(), pytest.raises(InputError, match="a controller drives this run"):
        run.delete()
    hold(Store(f"{run.uri}/checkpoints"), 6, "an export")
    with pytest.raises(InputError, match="is not removed: step 6 is held by an export"):
        run.delete()
    assert (folder / "half/job.yaml").exists()
    again = load_run(folder / "again")
    again.delete()
    assert (again.state, (folder / "again").exists()) == ("unknown", False)


def test_what_is_held_is_not_removed_and_what_refers_to_it_is_said(command: Any, folder: Path) -> None:
    hold(Store(str(folder / "small/checkpoints")), 8, f"the run {folder / 'again'}")
    job = yaml.safe_load((folder / "again/job.yaml").read_text())
    job["workload"]["init_from"] = f"{folder / 'half'}@4"
    (folder / "again/job.yaml").write_text(yaml.safe_dump(job))
    RunDir(str(folder / "half-longer")).create()
    found = listed(command, folder)
    assert found["small"]["held"] == [f"step 8 is held by the run {folder / 'again'}"]
    assert {name: row["referred"] for name, row in found.items()} == {
        "again": [],
        "half": ["again refers to it"],
        "small": [],
    }
    said = command("runs", folder, "--remove", "small", "--yes")
    assert (said.code, (folder / "small").exists()) == (2, True)
    assert f"is not removed: step 8 is held by the run {folder / 'again'}" in said.err
    # A reference alone is shown and holds nothing.
    assert command("runs", folder, "--remove", "half", "--yes").code == 0


def test_a_run_that_another_continues_is_named(command: Any, folder: Path) -> None:
    origin = {"run": str(folder / "small"), "step": 8}
    (folder / "again/origin.json").write_text(json.dumps(origin))
    assert listed(command, folder)["small"]["referred"] == ["again refers to it"]


def test_a_folder_without_runs_is_said_to_have_none(command: Any, tmp_path: Path) -> None:
    said = command("runs", tmp_path)
    assert (said.code, said.out) == (0, f"no run is in {tmp_path}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        ([".", "--remove", "nobody", "--yes"], "there is no such run in this folder; choose from: "),
    ],
)
def test_wrong_input_is_one_line(command: Any, words: list[str], says: str) -> None:
    said = command("runs", *words)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert says in said.err

"""What logs prints of a run that a command drives itself: no cluster, no job, a run directory alone."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_directories import run_of

from orchestrator.cli import followed
from orchestrator.cli.options import run_names
from orchestrator.launch import active_controller


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of two attempts."""
    run_of(tmp_path / "runs" / "small")
    for attempt, rank, text in ((1, 0, "old\n"), (2, 0, "loss 3\nsaved\n"), (2, 1, "loss 3\n")):
        folder = tmp_path / "runs" / "small" / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.log").write_text(text)
    controllers = tmp_path / "runs" / "small" / "logs" / "controller"
    controllers.mkdir()
    (controllers / "2026-01-01T00-00-00.log").write_text("begun\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ([], ["rank 0 | loss 3", "rank 0 | saved", "rank 1 | loss 3"]),
        (["--rank", 0], ["loss 3", "saved"]),
        (["--attempt", 1], ["rank 0 | old"]),
        (["--grep", "sav"], ["rank 0 | saved"]),
        (["--controller"], ["begun"]),
    ],
)
def test_the_lines_of_ranks_and_controllers(
    command: Any, here: Path, options: list[Any], lines: list[str]
) -> None:
    said = command("logs", "small", *options)
    assert (said.code, said.err) == (0, "")
    assert sorted(said.out.splitlines()) == lines


def test_as_json(command: Any, here: Path) -> None:
    found = json.loads(command("logs", "runs/small", "--rank", 1, "--json").out)
    assert found == [{"attempt": 2, "rank": 1, "line": "loss 3"}]


def test_an_attempt_that_was_not(command: Any, here: Path) -> None:
    said = command("logs", "small", "--attempt", 7)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "attempts 1, 2 did" in said.err


def test_a_run_that_is_followed_ends_with_it(
    command: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "EVERY", 0.02)
    run = here / "runs" / "small"
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"phase": "train"}))

    def go_on() -> None:
        time.sleep(0.2)
        with (run / "logs" / "attempt-2" / "rank-0.log").open("a") as log:
            log.write("the end\n")
        (run / "status.json").write_text(json.dumps(status))

    other = threading.Thread(target=go_on)
    other.start()
    said = command("logs", "small", "-f", "--rank", 0)
    other.join()
    assert said.out.splitlines() == ["loss 3", "saved", "the end"]


@pytest.mark.parametrize("options", [["--rank", 0], ["--controller"]])
def test_a_run_that_nobody_drives_is_followed_no_longer(
    command: Any, here: Path, monkeypatch: pytest.MonkeyPatch, options: list[Any]
) -> None:
    """As one that was killed: its status stays as it was."""
    monkeypatch.setattr(active_controller, "SILENCE", 0.05)
    monkeypatch.setattr(followed, "EVERY", 0.01)
    path = here / "runs/small/status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"phase": "train"}))
    said = command("logs", "small", "-f", *options)
    assert said.out.splitlines() == (["begun"] if options == ["--controller"] else ["loss 3", "saved"])
    assert (said.code, "no controller drives " in said.err) == (1, True)


def test_later_attempts_are_followed_to_the_end(command: Any, here: Path) -> None:
    said = command("logs", "small", "-f", "--rank", 0)
    assert said.out.splitlines() == ["loss 3", "saved"]


def test_a_shell_completes_the_names_of_runs(here: Path) -> None:
    run_of(here / "runs" / "smaller")
    (here / "runs" / "_data").mkdir()
    assert sorted(run_names("")) == ["small", "smaller"]
    assert run_names("smalle") == ["smaller"]
    assert run_names("runs/") == [], "paths are completed by the shell"

"""run and status, where nothing has to be started."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import followed, jobs
from orchestrator.cli.run import _where_next
from orchestrator.launch import active_controller


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job file and its finished run."""
    folder = Path(shutil.copytree(runs, tmp_path / "folder"))
    document = (folder / "job.yaml").read_text().replace(str(runs), str(folder))
    (folder / "job.yaml").write_text(document)
    stored = (folder / "runs/small/job.yaml").read_text().replace(str(runs), str(folder))
    (folder / "runs/small/job.yaml").write_text(stored)
    monkeypatch.chdir(folder)
    return folder


def test_a_finished_run_says_so_and_does_nothing(command: Any, here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")}
    said = command("run", "job.yaml")
    assert said.code == 0
    assert f"orchestrator: {here}/runs/small is finished: nothing to do\n" in said.err
    assert {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")} == before


def test_a_finished_run_as_json(command: Any, here: Path) -> None:
    said = command("run", "job.yaml", "--json")
    found = json.loads(said.out)
    assert (said.code, found["exit_code"], found["run_dir"]) == (0, 0, f"{here}/runs/small")
    assert found["summary"]["state"] == "done"
    assert found["summary"] == json.loads((here / "runs/small/summary.json").read_text())


@pytest.mark.parametrize(("name", "state", "step"), [("small", "done", 12), ("half", "stopped", 6)])
def test_the_status_of_a_run_that_has_ended(
    command: Any, here: Path, name: str, state: str, step: int
) -> None:
    said = command("status", f"runs/{name}", "--json")
    found = json.loads(said.out)
    assert (said.code, said.err) == (0, "")
    assert (found["phase"], found["state"], found["controller"]) == (state, state, "ended")
    assert (found["step"], found["steps"], found["attempt"], found["ranks"]) == (step, 12, 1, [])
    shown = command("status", f"runs/{name}")
    assert shown.out.startswith(f"{name}: {state}, step {step} of 12\nattempt 1, layout dp2")


def test_the_status_of_a_run_that_is_at_work_or_lost(command: Any, here: Path) -> None:
    path = here / "runs/small/status.json"
    status = {**json.loads(path.read_text()), "phase": "train", "time": 1.0, "eta_seconds": 90.0}
    status["processes"] = []
    status["ranks"] = [{"rank": 0, "node": "node-7", "pid": 4711, "state": "running", "step": 5}]
    path.write_text(json.dumps(status))
    found = json.loads(command("status", "runs/small", "--json").out)
    assert (found["state"], found["controller"]) == ("lost", "gone")
    path.write_text(json.dumps({**status, "processes": [], "time": time.time() - 60}))
    found = json.loads(command("status", "runs/small", "--json").out)
    assert found["state"] == "train"
    assert found["controller"].startswith("silent for 1 min ")
    assert " left" not in command("status", "runs/small").out
    path.write_text(json.dumps({**status, "time": 1e12}))
    assert json.loads(command("status", "runs/small", "--json").out)["controller"] == "alive"
    shown = command("status", "runs/small").out
    assert "node-7" in shown
    assert "4711" in shown
    assert " left" in shown.splitlines()[0]


def test_a_run_that_has_written_no_status_yet(command: Any, here: Path) -> None:
    for name in ("status.json", "summary.json", "metrics.jsonl"):
        (here / "runs/small" / name).unlink()
    found = json.loads(command("status", "runs/small", "--json").out)
    assert (found["phase"], found["controller"]) == ("unknown", "not heard of")
    shown = command("status", "runs/small")
    assert shown.code == 0
    assert "None" not in shown.out


@pytest.mark.parametrize("status", [None, '{"phase": '])
def test_without_a_status_the_summary_tells_how_a_run_ended(
    command: Any, here: Path, status: str | None
) -> None:
    (here / "runs/small/status.json").unlink()
    if status is not None:
        (here / "runs/small/status.json").write_text(status)
    said = command("status", "runs/small")
    assert said.out == (
        "small: done, step 12 of 12\nattempt 1, layout dp2 zero0 mb4, controller ended\n12 steps are done\n"
    )
    (row,) = [row for row in json.loads(command("top", "runs", "--json").out) if row["name"] == "small"]
    assert (row["state"], row["silent"], row["step"]) == ("done", "", "12 / 12")


def test_without_a_status_rows_tell_how_far_a_run_came(command: Any, here: Path) -> None:
    for name in ("status.json", "summary.json"):
        (here / "runs/small" / name).unlink()
    found = json.loads(command("status", "runs/small", "--json").out)
    assert (found["phase"], found["step"], found["steps"], found["attempt"]) == ("unknown", 12, 12, 1)


def test_a_run_may_be_named_by_its_name(command: Any, here: Path) -> None:
    assert json.loads(command("status", "half", "--json").out)["state"] == "stopped"
    (here / "half").mkdir()
    assert json.loads(command("status", "half", "--json").out)["state"] == "stopped", "a folder without a run"
    said = command("status", "./half")
    assert (said.code, said.err.count("\n")) == (2, 1), "a path is what was named"


def test_attach_tells_how_a_run_ended(command: Any, here: Path) -> None:
    assert json.loads(command("attach", "runs/small", "--json").out)["state"] == "done"
    said = command("attach", "half")
    assert said.code == 3
    assert said.out.startswith("half: stopped")


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:///mlflow.db", "  mlflow ui --backend-store-uri sqlite:///mlflow.db"),
        ("https://mlflow.example.org", "  https://mlflow.example.org"),
        ("http://me:secret@mlflow:5000", "  http://"),
    ],
)
def test_where_the_runs_are_seen(uri: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    _where_next("runs/small", uri, None, {})
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(shown)
    assert "secret" not in lines[-1]


def test_commands_for_a_folder_with_blanks_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    _where_next("my runs/a b", "sqlite:///my runs/m.db", None, {"tracking": {"problem": "late"}})
    said = capsys.readouterr().err
    for words in ("verify-resume 'my runs/a b' ", "checkpoint list 'my runs/a b' ", "report 'my runs/a b'`"):
        assert words in said
    assert "--backend-store-uri 'sqlite:///my runs/m.db'" in said


def test_the_last_lines_say_with_what_a_tokenizer_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    _where_next("runs/small", None, "hf", {"export": {"tokenizer_class": "PreTrainedTokenizerFast"}})
    told = capsys.readouterr()
    assert "transformers.PreTrainedTokenizerFast.from_pretrained: AutoTokenizer makes" in told.out + told.err
    _where_next("runs/small", None, "hf", {"export": {"uri": "x"}})
    told = capsys.readouterr()
    assert "Tokenizer" not in told.out + told.err


def test_attach_follows_a_run_until_its_new_summary_is_there(
    command: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "EVERY", 0.01)
    run = here / "runs/half"
    status, summary = (json.loads((run / name).read_text()) for name in ("status.json", "summary.json"))
    looks = iter(
        [
            lambda: replace(run / "status.json", status | {"phase": "train", "time": 1.0}),
            lambda: replace(run / "status.json", status | {"phase": "done", "time": 2.0}),
            lambda: None,
            lambda: replace(run / "summary.json", summary | {"state": "done", "ended": time.time() + 1}),
        ]
    )
    next(looks)()
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: next(looks)())
    said = command("attach", "runs/half")
    assert said.code == 0
    assert said.out.startswith("half: done")
    assert next(looks, None) is None


def test_attach_does_not_wait_for_a_run_that_nobody_drives(
    command: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_controller, "SILENCE", 0.05)
    monkeypatch.setattr(followed, "EVERY", 0.01)
    path = here / "runs/half/status.json"
    replace(path, json.loads(path.read_text()) | {"phase": "train"})
    said = command("attach", "runs/half")
    assert said.code == 1
    assert "no controller drives " in said.err


def replace(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))

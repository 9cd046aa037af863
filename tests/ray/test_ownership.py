"""What a command may remove: nothing but what it made itself, for a run that never began."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from jobs import job, orchestrator, rows, slow_job, started, status, wait_for, write_job, write_text


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the data cache."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_data" not in path.parts
    }


def test_a_training_whose_data_is_removed_meanwhile_ends_well(tmp_path: Path) -> None:
    document = slow_job(write_text(tmp_path / "corpus", 40_000), steps=8)
    document["checkpoint"]["export"] = "hf"
    path, run = write_job(tmp_path, document), tmp_path / "runs" / "small"
    with started("run", path, cwd=tmp_path) as process:
        wait_for(lambda: status(run).get("step", 0) >= 1, "the first step")
        shutil.rmtree(tmp_path / "runs" / "_data")
        shutil.rmtree(tmp_path / "corpus")
        assert process.wait(timeout=240) == 0, (tmp_path / "output.txt").read_text()
    assert [row["step"] for row in rows(run)] == list(range(1, 9))
    assert json.loads((run / "summary.json").read_text())["state"] == "done"
    assert json.loads((run / "export/export.json").read_text())["step"] == 8


def test_two_commands_at_once_on_a_new_directory(tmp_path: Path) -> None:
    """One trains; the other waits for its lock, says so, and touches nothing."""
    path, run = (
        write_job(tmp_path, slow_job(write_text(tmp_path / "corpus", 40_000), steps=200)),
        tmp_path / "runs/small",
    )
    with started("run", path, cwd=tmp_path) as one, started("run", path, cwd=tmp_path) as two:
        loser = wait_for(lambda: next((p for p in (one, two) if p.poll() is not None), None), "one to end")
        winner = two if loser is one else one
        said = (tmp_path / "output.txt").read_text()
        assert loser.returncode == 2, said
        assert "another controller is at work on this run" in said
        before = files(run)
        assert {"job.yaml", "events.jsonl", ".lock"} <= before.keys()
        wait_for(lambda: status(run).get("step", 0) >= 1, "the first step")
        winner.terminate()
        assert winner.wait(timeout=240) == 3, (tmp_path / "output.txt").read_text()
    assert files(run)["job.yaml"] == before["job.yaml"]
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert [event["phase"] for event in rows(run, "events.jsonl")][:1] == ["prepare"]


def test_a_first_command_whose_text_is_wrong_leaves_what_it_found(tmp_path: Path) -> None:
    """It is seen only once the data is prepared: by then a controller has written."""
    (tmp_path / "text.txt").write_text("ab " * 40)
    document = job(str(tmp_path / "text.txt"))
    document["data"]["sequence_length"] = 100
    path = write_job(tmp_path, document)
    before = files(tmp_path)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert files(tmp_path) == before
    assert not (tmp_path / "runs/small").exists()
    (tmp_path / "mine").mkdir()
    done = orchestrator("run", path, "--run-dir", "mine", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert list((tmp_path / "mine").iterdir()) == []

"""What a command may remove: nothing but what it made itself, for a run that never began."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from jobs import job, orchestrator, rows, slow_job, started, status, wait_for, write_job, write_text
from open_ports import listening, served
from prepared import with_data

from orchestrator import load_run


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the data cache."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_data" not in path.parts
    }


@pytest.mark.slow
def test_two_commands_at_once_on_a_new_directory_and_the_one_at_work_is_killed(tmp_path: Path) -> None:
    """One trains; the other waits for its lock, says so, and touches nothing. The first one's SIGKILL takes its
    embedded Ray along, and leaves what was trained."""
    document = with_data(slow_job(write_text(tmp_path / "corpus", 40_000), steps=200), tmp_path / "data")
    document["resources"]["workers"] = 1
    path, run = write_job(tmp_path, document), tmp_path / "runs/small"
    with started("run", path, cwd=tmp_path) as one, started("run", path, cwd=tmp_path) as two:
        loser = wait_for(lambda: next((p for p in (one, two) if p.poll() is not None), None), "one to end")
        winner = two if loser is one else one
        said = (tmp_path / "output.txt").read_text()
        assert loser.returncode == 2, said
        assert "another controller is active for this run" in said
        before = files(run)
        assert {"job.yaml", "events.jsonl", ".lock"} <= before.keys()
        wait_for(lambda: status(run).get("step", 0) >= 1, "the first step")
        members = psutil.Process(winner.pid).children(recursive=True)
        titles = [" ".join(member.cmdline()).lower() for member in members]
        assert any("agent" in title for title in titles)
        assert [title for title in titles if "monitor" in title or "dashboard.py" in title] == []
        places = listening(members)
        assert {kind for _, _, kind, _ in places} >= {"raylet", "gcs_server"}
        assert served(places) == []
        winner.kill()
        _, alive = psutil.wait_procs(members, timeout=30)
        assert [(member.pid, member.cmdline()[:4]) for member in alive] == []
        assert load_run(run).state == "lost", "its processes are gone, and its status says that it trains"
        shown = orchestrator("status", "small", cwd=tmp_path)
        assert shown.stdout.startswith("small: lost, step "), shown
        assert "the same command resumes it" in shown.stdout
    assert files(run)["job.yaml"] == before["job.yaml"]
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert [event["phase"] for event in rows(run, "events.jsonl")][:1] == ["prepare"]


@pytest.mark.slow
def test_a_first_command_whose_text_is_wrong_leaves_what_it_found(tmp_path: Path) -> None:
    """It is seen only once the data is prepared: by then a controller has written."""
    (tmp_path / "text.txt").write_text("ab " * 40)
    document = job(str(tmp_path / "text.txt"))
    document["data"]["sequence_length"] = 100
    path = write_job(tmp_path, document)
    (tmp_path / "mine").mkdir()
    before = files(tmp_path)
    done = orchestrator("run", path, "--run-dir", "mine/runs/small", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert files(tmp_path) == before
    assert not (tmp_path / "mine/runs/small").exists()
    assert (tmp_path / "mine").exists()

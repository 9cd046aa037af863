"""The same rank program inside Ray Train: the run that `orchestrator run` would have made, faults included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jobs import curve, job, orchestrator, rows, weights, write_job, write_text

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def test_ray_train_restarts_the_workers_and_they_go_on_from_our_commit(tmp_path: Path) -> None:
    """A killed worker there, nothing here: the same bits, and a run directory that every command reads."""
    document = job(write_text(tmp_path / "corpus"))
    path = write_job(tmp_path, document)
    words = [sys.executable, str(EXAMPLE), str(path), "--fault", "kill@1:11"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done: step 12" in done.stdout
    run = tmp_path / "runs" / "small"
    starts = [event for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    assert [event["attempt"] for event in starts] == [1, 2]
    assert starts[1]["reason"].startswith("2 workers from the commit at step ")
    there = tmp_path / "there"
    there.mkdir()
    document["data"]["cache"] = str(run.parent / "_data")
    assert orchestrator("run", write_job(there, document), cwd=there).returncode == 0
    ours = there / "runs" / "small"
    assert curve(run) == curve(ours)
    assert weights(run, 12) == weights(ours, 12)

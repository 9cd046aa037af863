"""Several jobs on one cluster: a higher one comes, the lower one makes room with a commit and goes on later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import curve, orchestrator, rows, slow_job, status, wait_for, write_job, write_text
from local_nodes import two_nodes

from cluster.local import local_cluster as loopback

NAME = "t-queue"


@pytest.fixture
def local() -> Iterator[loopback.LocalCluster]:
    with two_nodes(NAME) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lower_job_makes_room_with_a_commit_and_goes_on(
    local: loopback.LocalCluster, tmp_path: Path
) -> None:
    """Two runs are never placed on the same capacity: asked for in ray#66002."""
    # Long enough for two more jobs to be sent while it trains, on a busy machine too.
    document = slow_job(write_text(tmp_path / "corpus"), steps=300)
    document["resources"]["workers"] = {"min": 2, "max": 2}
    document["data"]["cache"] = str(tmp_path / "data")
    low = write_job(tmp_path, {**document, "name": "low"}, "low.yaml")
    quiet = orchestrator("run", low, "--run-dir", tmp_path / "quiet", cwd=tmp_path, timeout=600)
    assert quiet.returncode == 0, quiet.stderr
    short = {**document["train"], "steps": 6}
    high = write_job(tmp_path, {**document, "name": "high", "train": short}, "high.yaml")
    same = write_job(tmp_path, {**document, "name": "same", "train": short}, "same.yaml")
    at = ["--address", local.dashboard]
    runs = {name: tmp_path / "runs" / name for name in ("low", "high", "same")}

    assert orchestrator("submit", low, *at, cwd=tmp_path).returncode == 0
    wait_for(lambda: status(runs["low"]).get("step", 0) >= 3, "the first job's steps", 120)
    assert orchestrator("submit", same, *at, cwd=tmp_path).returncode == 0
    waits = "waits for its turn: 2 workers of 1 CPU; there is room for 0; running: low"
    wait_for(lambda: status(runs["same"]).get("note") == waits, "an equal to wait and say for what", 60)
    done = orchestrator("submit", high, *at, "--priority", 5, "--wait", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in ("same", "low"):
        ended = orchestrator("attach", name, *at, cwd=tmp_path, timeout=600)
        assert ended.returncode == 0, ended.stderr

    assert curve(runs["low"]) == curve(tmp_path / "quiet")
    events = rows(runs["low"], "events.jsonl")
    assert any(event["reason"] == "makes room for high" for event in events)
    assert not any(event["first_fault"] for event in events)
    ends = {name: json.loads((run / "summary.json").read_text())["ended"] for name, run in runs.items()}
    # The one that made room went back into the line, behind the equal that waited already.
    assert ends["high"] < ends["same"] < ends["low"]

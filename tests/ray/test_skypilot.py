"""SkyPilot's task file: its script on two machines that are processes here, with the variables that SkyPilot sets; the
hook before a preemption, and the start after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from jobs import job, orchestrator, rows, status, wait_for, write_job, write_text

ADDRESSES = ("127.0.0.43", "127.0.0.44")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job and its task file."""
    document = job(write_text(tmp_path / "corpus"), steps=500) | {"checkpoint": {"every": 50, "export": None}}
    document["resources"] = {"workers": {"min": 2, "max": 2}}
    write_job(tmp_path, document)
    options = ("--runs", "s3://bucket/runs", "--to", ".", "--python", sys.executable)
    done = orchestrator("cluster", "render", "skypilot", "job.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def task(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "small.sky.yaml").read_text())
    return found


def launched(folder: Path) -> list[subprocess.Popen[bytes]]:
    """The task's script on each node. The bucket is a folder here."""
    script = task(folder)["run"].replace("s3://bucket/runs", str(folder / "runs"))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    kept |= {"ORCHESTRATOR_TOKEN": "5e" * 32, "RAY_ADDRESS": "127.0.0.1:6380"}
    kept |= {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NUM_NODES": "2", "FOLDER": str(folder)}
    found = []
    for rank in range(2):
        (home := folder / f"home{rank}").mkdir(exist_ok=True)
        with (folder / f"log{rank}").open("ab") as log:
            node = kept | {"SKYPILOT_NODE_RANK": str(rank), "HOME": str(home)}
            found.append(
                subprocess.Popen(["bash", "-c", script], cwd=folder, env=node, stdout=log, stderr=log)
            )
    return found


def logs(folder: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in sorted(folder.glob("log*")))


def left(folder: Path) -> list[int]:
    """Processes of the two machines that live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("FOLDER") == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_it_commits_before_a_preemption_and_goes_on_after_it(folder: Path) -> None:
    run = folder / "runs" / "small"
    first = launched(folder)
    try:
        wait_for(lambda: run.exists() and status(run).get("step", 0) >= 10, "some steps", 150)
        assert {rank["node"] for rank in status(run)["ranks"]} == set(ADDRESSES)
        (hook,) = task(folder)["config"]["hooks"]
        home = {**os.environ, "HOME": str(folder / "home0")}
        subprocess.run(["bash", "-c", hook["run"]], env=home, check=True, timeout=hook["timeout"])
        assert [node.wait(60) for node in first] == [75, 0], logs(folder)
    finally:
        for node in first:
            node.kill()
    assert task(folder)["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert 0 < status(run)["step"] < 500

    second = launched(folder)
    try:
        assert [node.wait(240) for node in second] == [0, 0], logs(folder)
    finally:
        for node in second:
            node.kill()
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 501))
    deadline = time.monotonic() + 20
    while left(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left(folder) == []

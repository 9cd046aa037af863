"""The batch file for Slurm, with an `srun` that starts real processes: Ray on two nodes, the signal, the requeue, and a
preemption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from jobs import job, orchestrator, rows, status, wait_for, write_job, write_text

SRUN = """#!/bin/bash
# Starts the command once for each node, as srun does with one task a node, all with its own standard input.
while [[ "$1" == --* ]]; do shift; done
number=0; pids=''
exec 3<&0
for host in 127.0.0.41 127.0.0.42; do
  SLURM_PROCID=$number SLURMD_NODENAME=$host "$@" <&3 3<&- &
  pids="$pids $!"; number=$((number + 1))
done
trap 'kill -TERM $pids' TERM
for _ in 1 2 3 4; do wait $pids; done
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames"*) printf '127.0.0.41\\n127.0.0.42\\n';;
  "show job"*) echo "JobState=RUNNING PreemptTime=2026-11-28T04:48:31";;
  *) echo "$@" >> "$SLURM_SUBMIT_DIR/requeued";;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job, its batch file, Slurm's commands, and a package of a user's with the name of one of ours."""
    document = job(write_text(tmp_path / "corpus"), steps=500) | {"checkpoint": {"every": 50, "export": None}}
    document.pop("tracking", None)
    document["resources"] = {"workers": {"min": 2, "max": 2}}
    write_job(tmp_path, document)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").touch()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    done = orchestrator(
        "cluster", "render", "slurm", "job.yaml", "--runs", "runs", "--to", ".", "--time", "10", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return tmp_path


def batch(folder: Path, number: int) -> subprocess.Popen[bytes]:
    """The batch file, as Slurm starts it."""
    more = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "two", "SLURM_SUBMIT_DIR": str(folder)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (script,) = folder.glob("*.sbatch")
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            ["bash", script], cwd="/", env=kept | more | {"PATH": path}, stdout=log, stderr=log
        )


def left(folder: Path) -> list[int]:
    """Processes whose command or environment names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SLURM_SUBMIT_DIR") == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_it_commits_at_the_signal_is_requeued_and_goes_on(folder: Path) -> None:
    """On two nodes, whose ranks find each other: asked for in Oumi#2007."""
    (run,) = [folder / "runs" / "small"]
    first = batch(folder, os.getpid() % 10_000 + 1)
    try:
        wait_for(lambda: run.exists() and status(run).get("step", 0) >= 10, "some steps", 150)
        (token,) = folder.glob(".orchestrator-*/token")
        assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
        assert {rank["node"] for rank in status(run)["ranks"]} == {"127.0.0.41", "127.0.0.42"}
        first.send_signal(signal.SIGUSR1)
        assert first.wait(120) == 3, (folder / "log").read_text()[-3000:]
    finally:
        first.kill()
    assert (folder / "requeued").read_text().startswith("requeue ")
    assert list(folder.glob(".orchestrator-*")) == []
    reached = status(run)["step"]
    assert 0 < reached < 500

    second = batch(folder, os.getpid() % 10_000 + 1)
    try:
        assert second.wait(240) == 0, (folder / "log").read_text()[-3000:]
    finally:
        second.kill()
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 501))
    assert len((folder / "requeued").read_text().splitlines()) == 1
    deadline = time.monotonic() + 20
    while left(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left(folder) == []


@pytest.mark.slow
def test_no_step_is_lost_where_all_tasks_are_signalled(folder: Path) -> None:
    """As Slurm does at a preemption; a script that is killed later leaves no node."""
    run, number = folder / "runs" / "small", os.getpid() % 10_000 + 2
    document = yaml.safe_load((folder / "job.yaml").read_text())
    document["checkpoint"]["every"] = 5000
    write_job(folder, document)
    first = batch(folder, number)
    try:
        wait_for(lambda: run.exists() and status(run).get("step", 0) >= 10, "some steps", 150)
        for pid in tasks(folder):
            os.kill(pid, signal.SIGTERM)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 3, (folder / "log").read_text()[-3000:]
    finally:
        first.kill()
    assert status(run)["step"] >= 10
    assert (run / "checkpoints" / f"step-{status(run)['step']:08d}" / "manifest.json").exists()
    assert (folder / "requeued").read_text() == f"requeue {number}\n"
    wait_for(lambda: not left(folder), "what is left to end", 10)

    second = batch(folder, number)
    try:
        wait_for(lambda: len(tasks(folder)) == 2, "two nodes", 60)
    finally:
        second.kill()
    wait_for(lambda: not tasks(folder), "the nodes to end", 60)


def tasks(folder: Path) -> list[int]:
    """The processes that `srun` has started."""
    end = ["-P", "-m", "cluster.local.allocation"]
    return [pid for pid in left(folder) if psutil.Process(pid).cmdline()[1:4] == end]

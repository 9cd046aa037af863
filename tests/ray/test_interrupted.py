"""An embedded Ray and the end of its driver: told in a line, and nothing outlives it (a driver that is killed is in
test_ownership)."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jobs import (
    is_frozen,
    job,
    kill_tree,
    orchestrator,
    rank_pid,
    rows,
    slow_job,
    started,
    status,
    wait_for,
    write_job,
    write_text,
)


def family(pid: int) -> list[psutil.Process]:
    """All that a process has started, directly or not."""
    return psutil.Process(pid).children(recursive=True)


def test_a_signal_before_ray_is_up_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path, slow_job(write_text(tmp_path / "corpus", 40_000)))
    with started("run", path, cwd=tmp_path) as process:

        def starting() -> list[psutil.Process]:
            return [child for child in family(process.pid) if child.name() == "gcs_server"]

        wait_for(starting, "Ray to begin to start")
        members = family(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130, (tmp_path / "output.txt").read_text()
        _, alive = psutil.wait_procs(members, timeout=30)
        assert alive == []
    assert (tmp_path / "output.txt").read_text().splitlines()[-1].startswith("orchestrator: interrupted")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_all_of_the_group_ends_the_run_with_a_commit(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As job managers and terminals that are closed send it: Ray itself is not hit.

    Asked for in transformers#41723 and Automodel#2972.
    """
    document = slow_job(write_text(tmp_path / "corpus", 40_000), steps=4000)
    path, run = write_job(tmp_path, document), tmp_path / "runs" / document["name"]
    with started("run", path, cwd=tmp_path, start_new_session=True) as process:
        wait_for(lambda: status(run).get("step", 0) >= 3, "some steps", 120)
        members = family(process.pid)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == 3, (tmp_path / "output.txt").read_text()
        assert psutil.wait_procs(members, timeout=30)[1] == []
    said = (tmp_path / "output.txt").read_text()
    assert "asked to stop: the run commits and ends; another Ctrl-C or SIGTERM ends it at once" in said
    assert said.splitlines()[-1] == "orchestrator: stopped by the user"
    assert json.loads((run / "summary.json").read_text())["commit"] == rows(run)[-1]["step"]


@pytest.mark.slow
def test_data_that_is_damaged_is_made_again_by_the_processors_of_the_gang(tmp_path: Path) -> None:
    """All that there are."""
    workers = len(os.sched_getaffinity(0))
    document = job(write_text(tmp_path / "corpus"))
    document["resources"] = {"workers": {"min": 1, "max": workers}}
    document["train"]["global_batch"] = 4 * workers
    document["data"]["cache"] = str(tmp_path / "cache")
    path, run = write_job(tmp_path, document), tmp_path / "runs/small"
    assert orchestrator("run", path, "--until", "4", cwd=tmp_path).returncode == 3
    (shard,) = (tmp_path / "cache").glob("*/shards/000000.bin")
    shard.chmod(0o644)
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 4
    shard.write_bytes(data)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, 13))
    told = [json.loads(line)["reason"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "the data is gone, and is made again" in told


@pytest.mark.slow
def test_a_stop_outlives_a_controller_that_is_killed_in_its_middle(tmp_path: Path) -> None:
    """Ray starts another, which was never asked: the command asks again. Then the same command continues."""
    path, run = write_job(tmp_path, job(write_text(tmp_path / "corpus"))), tmp_path / "runs/small"
    with started("run", path, "--fault", "stop@1:10", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(run, 1)), "rank 1 to freeze at step 10")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: status(run)["note"].startswith("stopping"), "the stop to be heard")
        psutil.Process(status(run)["pid"]).kill()
        assert process.wait(timeout=240) == 3, (tmp_path / "output.txt").read_text()
    assert rows(run)[-1]["step"] < 12
    # The frozen rank may still hold its part of the commit at step 8. It began that after the one at step 4 was whole.
    assert json.loads((run / "summary.json").read_text())["commit"] in (4, 8)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, 13))


@pytest.mark.slow
def test_a_kill_of_all_in_the_middle_of_a_stop_loses_nothing(tmp_path: Path) -> None:
    path, run = write_job(tmp_path, job(write_text(tmp_path / "corpus"))), tmp_path / "runs/small"
    with started("run", path, "--fault", "stop@1:7", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(run, 1)), "rank 1 to freeze at step 7")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: status(run)["note"].startswith("stopping"), "the stop to be heard")
        kill_tree(process.pid)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, 13))
    assert not list(run.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    """Twenty moments from 0.1 s on, spread over what a whole run takes here: before there is a commit exit code 130 and
    no run directory, or one that the same command continues from; after it 3, and what has ended is done."""
    document = job(write_text(tmp_path / "corpus", 40_000))
    path = write_job(tmp_path, document)
    began = time.monotonic()
    assert orchestrator("run", path, "--run-dir", "runs/whole", cwd=tmp_path).returncode == 0
    whole = time.monotonic() - began
    codes = []
    for moment in range(20):
        name = f"moment-{moment}"
        with started("run", path, "--run-dir", f"runs/{name}", cwd=tmp_path) as process:
            members: list[psutil.Process] = []
            end = time.monotonic() + 0.1 + whole * moment / 20
            while time.monotonic() < end and process.poll() is None:
                with suppress(psutil.Error):
                    members = list({*members, *family(process.pid)})
                time.sleep(0.05)
            with suppress(psutil.Error):
                members = list({*members, *family(process.pid)})
            process.send_signal(signal.SIGINT)
            codes.append(process.wait(timeout=120))
            print(name, codes[-1])
            _, alive = psutil.wait_procs(members, timeout=30)
            assert alive == [], f"{name}: {alive}"
        run = tmp_path / "runs" / name
        said = (tmp_path / "output.txt").read_text()
        assert codes[-1] in (0, 3, 130), f"{name}: {codes[-1]}\n{said[-2000:]}"
        commits = list(run.glob("checkpoints/*/manifest.json"))
        assert bool(commits) or codes[-1] == 130, f"{name}: {codes[-1]} without a commit"
        assert not list(run.rglob("*.tmp")), name
        assert not run.exists() or (run / "job.yaml").exists(), f"{name}: {sorted(run.rglob('*'))}"
    assert codes[0] == 130
    assert "Traceback" not in said

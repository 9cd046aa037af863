"""Chains as users run them: killed anywhere and twice at once, stopped, submitted; always the quiet twin's weights."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import (
    curve,
    is_frozen,
    job,
    kill_tree,
    orchestrator,
    rank_pid,
    rows,
    started,
    status,
    wait_for,
    weights,
    write_job,
    write_text,
)
from local_nodes import two_nodes

from cluster.local import local_cluster as loopback

NAME = "t-chain"
STAGES = ("base", "left", "right")
STEPS = {"base": 12, "left": 8, "right": 8}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def document(folder: Path) -> dict[str, Any]:
    """A base and two trainings that begin with it, one with other seeds than the other."""
    found = job(str(folder / "corpus" / "topics.txt")) | {"name": "c", "parallel": {"micro_batch": 4}}
    found["resources"]["workers"] = {"min": 2, "max": 2}
    found["data"]["cache"] = str(folder / "data")
    found["tracking"] = {"uri": "sqlite:///mlflow.db", "experiment": "chains"}
    begin = {
        "workload": {"init_from": "stage:base"},
        "data": {"tokenizer": "stage:base"},
        "train": {"steps": 8},
    }
    return found | {
        "stages": [{"name": "base"}, {"name": "left", **begin}, {"name": "right", **begin, "seed": 9}]
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("chain")
    write_text(found / "corpus")
    return found


@pytest.fixture(scope="module")
def quiet(folder: Path) -> Path:
    done = orchestrator("run", write_job(folder, document(folder)), "--json", cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["exit_code"], found["chain"]["state"]) == (0, "done")
    return folder / "runs" / "c"


def assert_same(root: Path, quiet: Path) -> None:
    for name in STAGES:
        assert curve(root / name) == curve(quiet / name)
        assert weights(root / name, STEPS[name]) == weights(quiet / name, STEPS[name])


def test_it_is_one_run_in_mlflow_and_one_report_with_links(quiet: Path, folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("chains")
    logged = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = logged.pop("c")
    assert set(logged) == {f"c-{name}" for name in STAGES}
    assert {run.data.tags["mlflow.parentRunId"] for run in logged.values()} == {parent.info.run_id}
    assert parent.info.status == "FINISHED"
    artefacts = {found.path for found in client.list_artifacts(parent.info.run_id)}
    assert artefacts == {"chain.json", "job.yaml", "report.html"}
    page = (quiet / "report.html").read_text()
    for name in STAGES:
        assert f'<a href="{name}/report.html">{name}</a>' in page
        assert (quiet / name / "report.html").exists()


def test_a_finished_chain_is_left_alone(quiet: Path, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in quiet.rglob("*") if path.is_file()}
    again = orchestrator("run", folder / "job.yaml", cwd=folder)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in quiet.rglob("*") if path.is_file()} == before
    shown = json.loads(orchestrator("status", quiet, "--json", cwd=folder).stdout)
    assert [(stage["stage"], stage["state"]) for stage in shown["stages"]] == [
        (name, "done") for name in STAGES
    ]


def test_kills_in_every_stage_and_between_two_change_no_bit(
    quiet: Path, folder: Path, tmp_path: Path
) -> None:
    path, root = write_job(tmp_path, document(folder)), tmp_path / "runs" / "c"
    with started("run", path, "--fault", "base:stop@0:7", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(root / "base", 0)), "rank 0 of the base to freeze")
        kill_tree(process.pid)
    with started("run", path, cwd=tmp_path) as process:
        wait_for(lambda: status(root / "base").get("phase") == "done", "the base to be done")
        kill_tree(process.pid)  # before another stage has begun
    # The ranks of both are there, one of them does not go on, and the other's controller is killed.
    with started("run", path, "--fault", "left:stop@1:6", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(root / "left", 1)), "rank 1 of a stage to freeze")
        wait_for(lambda: status(root / "right").get("pid"), "the other stage's controller")
        psutil.Process(status(root / "right")["pid"]).kill()
        kill_tree(process.pid)
    with started("run", path, "--fault", "right:kill@1:5", cwd=tmp_path) as process:
        assert process.wait(timeout=600) == 0, (tmp_path / "output.txt").read_text()
    assert_same(root, quiet)
    assert not list(root.rglob("*.tmp"))


def test_a_second_command_is_refused_and_a_stop_goes_on(quiet: Path, folder: Path, tmp_path: Path) -> None:
    path, root = write_job(tmp_path, document(folder)), tmp_path / "runs" / "c"
    faults = ("--fault", "base:stop@1:10", "--fault", "left:stop@1:4")
    with started("run", path, *faults, cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(root / "base", 1)), "rank 1 to freeze")
        second = orchestrator("run", path, cwd=tmp_path)
        assert second.returncode == 2, second.stderr
        assert "another command trains this run" in second.stderr
        # Meanwhile the frozen rank has been replaced. One of a stage on top of it freezes as well, so that there is
        # something to stop.
        wait_for(lambda: is_frozen(rank_pid(root / "left", 1)), "rank 1 of a stage on top of it to freeze")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 3, (tmp_path / "output.txt").read_text()
    found = json.loads((root / "chain.json").read_text())
    assert found["state"] == "stopped"
    assert found["stages"][0]["state"] == "done"
    done = orchestrator("run", path, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert_same(root, quiet)


def test_a_stage_that_fails_ends_the_chain_with_a_line(folder: Path, tmp_path: Path) -> None:
    wanted = document(folder)
    wanted["stages"][2]["limits"] = {"restarts": 0}
    wanted["stages"].append({"name": "last", **wanted["stages"][2] | {"name": "last"}})
    wanted["stages"][3]["workload"] = {"init_from": "stage:right"}
    path = write_job(tmp_path, wanted)
    done = orchestrator("run", path, "--fault", "right:kill@0:3", cwd=tmp_path, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "orchestrator: right failed: " in done.stderr
    assert done.stderr.rstrip().endswith("last does not begin")
    states = {
        each["stage"]: each["state"]
        for each in json.loads((tmp_path / "runs/c/chain.json").read_text())["stages"]
    }
    assert states == {"base": "done", "left": "done", "right": "failed", "last": "not begun"}


@pytest.fixture
def local() -> Iterator[loopback.LocalCluster]:
    with two_nodes(NAME) as cluster:
        yield cluster


def test_a_submitted_chain_takes_turns_is_stopped_and_goes_on(
    local: loopback.LocalCluster, quiet: Path, folder: Path, tmp_path: Path
) -> None:
    path, root = write_job(tmp_path, document(folder)), tmp_path / "runs" / "c"
    at = ["--address", local.dashboard]

    def said(*words: object, code: int = 0, **keywords: Any) -> subprocess.CompletedProcess[str]:
        done = orchestrator(*words, *at, cwd=tmp_path, timeout=600, **keywords)
        assert done.returncode == code, done.stderr
        return done

    said("submit", path)
    # Both need both processors, so that one of them waits.
    waits = wait_for(
        lambda: [
            name
            for name in STAGES[1:]
            if "waits for its turn: 2 workers" in status(root / name).get("note", "")
        ],
        "a stage to wait for the other",
        300,
    )
    other = next(name for name in STAGES[1:] if name not in waits)
    wait_for(lambda: status(root / other).get("step", 0) >= 1, "the other to train")
    said("stop", root)
    found = json.loads((root / "chain.json").read_text())
    assert found["state"] == "stopped"
    said("submit", path, "--wait")
    assert_same(root, quiet)
    assert rows(root / other, "events.jsonl")[-1]["phase"] == "done"

"""Runs whose controller was killed do not stay RUNNING in MLflow: against a real store on SQLite."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import wait_for

from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.observe.mlflow_dead_runs import SETTLED, end_dead_run, end_other_dead_runs
from orchestrator.observe.mlflow_delivery import Tracker
from orchestrator.storage.process_identity import lineage, process_identity
from orchestrator.storage.run_directory import RunDir

BORN = 1_700_000_000.0
SEEN = BORN + 90.5


def job(uri: str, experiment: str) -> JobSpec:
    return parse({
        "name": "demo",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "s3://b/x"}], "tokenizer": "t.json", "sequence_length": 64},
        "train": {"steps": 5, "global_batch": 4},
        "tracking": {"uri": uri, "experiment": experiment},
    })  # fmt: skip


def killed() -> dict[str, Any]:
    """The identity of a real process that was killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = process_identity(process.pid)
        process.kill()
    return identity


def begun(folder: Path, spec: JobSpec, processes: list[dict[str, Any]], born: float = BORN) -> RunDir:
    """A run that trains, of whose three rows MLflow has two."""
    run = RunDir(str(folder))
    run.create()
    run.write_text("job.yaml", dump(spec))
    run.append("events.jsonl", [{"time": born, "phase": "train", "attempt": 1}])
    rows = [
        {"step": s, "time": born + s, "loss": 9.0 / s, "attempt": 1, "step_seconds": 1.0} for s in (1, 2, 3)
    ]
    run.append("metrics.jsonl", rows[:2])
    tracker = Tracker(spec.tracked, run)
    tracker.rows(rows[:2])
    assert tracker.close(60).problem is None
    run.append("metrics.jsonl", rows[2:])
    status = {"phase": "train", "step": 3, "steps": 5, "time": SEEN, "attempt": 1, "processes": processes}
    run.write_json("status.json", status)
    return run


def shown(client: Any, experiment: str) -> dict[str, tuple[str, int | None]]:
    """The status and the end of each run of an experiment, by its name."""
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {run.info.run_name: (run.info.status, run.info.end_time) for run in found}


@pytest.mark.slow
def test_a_lost_run_ends_when_it_was_last_seen_with_all_its_rows(
    tmp_path: Path, store: str, client: Any
) -> None:
    spec = job(store, "lost")
    run = begun(tmp_path / "lost", spec, [killed()])
    assert shown(client, "lost") == {"lost": ("RUNNING", None)}
    assert end_dead_run(run) == "MLflow shows it as KILLED now"
    assert shown(client, "lost") == {"lost": ("KILLED", int(SEEN * 1000))}
    (found,) = client.search_runs([client.get_experiment_by_name("lost").experiment_id])
    assert [m.step for m in client.get_metric_history(found.info.run_id, "loss")] == [1, 2, 3]
    assert end_dead_run(run) == "", "MLflow is not asked each time"
    resumed = Tracker(spec.tracked, run)
    assert resumed.close(60).problem is None
    assert shown(client, "lost")["lost"][0] == "RUNNING"
    # It is lost once more, and MLflow is told once more.
    run.write_json("status.json", run.read_json("status.json") | {"time": SEEN + 60})
    assert end_dead_run(run)
    assert shown(client, "lost") == {"lost": ("KILLED", int((SEEN + 60) * 1000))}


def test_a_run_at_work_and_one_without_tracking_are_left_alone(
    tmp_path: Path, store: str, client: Any
) -> None:
    spec = job(store, "alive")
    run = begun(tmp_path / "alive", spec, lineage())
    run.write_json("status.json", run.read_json("status.json") | {"time": time.time()})
    assert end_dead_run(run) == ""
    assert shown(client, "alive")["alive"][0] == "RUNNING"
    bare = begun(tmp_path / "b", spec, [killed()])
    bare.write_text("job.yaml", dump(spec.model_copy(update={"tracking": None})))
    assert end_dead_run(bare) == ""


@pytest.mark.slow
def test_a_server_that_is_down_is_asked_again_by_the_next_command(tmp_path: Path, store: str) -> None:
    run = begun(tmp_path / "down", job(store, "down"), [killed()])
    run.write_text("job.yaml", dump(job("http://127.0.0.1:9", "down")))
    assert end_dead_run(run).startswith("MLflow may show it as running: ")
    assert not run.exists(SETTLED)
    run.write_text("job.yaml", dump(job(store, "down")))
    assert end_dead_run(run) == "MLflow shows it as KILLED now"


def test_the_start_of_a_run_ends_the_lost_ones_of_its_experiment(
    tmp_path: Path, store: str, client: Any
) -> None:
    spec = job(store, "others")
    begun(tmp_path / "lost", spec, [killed()])
    begun(tmp_path / "alive", spec, lineage())
    begun(tmp_path / "elsewhere", spec, [killed() | {"boot": "another machine"}])
    again = begun(tmp_path / "again", spec, [killed()])
    again.append("events.jsonl", [{"time": BORN + 500, "phase": "train", "attempt": 1, "extended": True}])
    for name in ("alive", "elsewhere"):
        run = RunDir(str(tmp_path / name))
        run.write_json("status.json", run.read_json("status.json") | {"time": time.time()})
    begun(tmp_path / "other", job(store, "another experiment"), [killed()])

    started = RunDir(str(tmp_path / "new"))
    started.create()
    started.append("events.jsonl", [{"time": BORN + 900, "phase": "train", "attempt": 1}])
    tracker = Tracker(spec.tracked, started, begins=end_other_dead_runs)
    tracker.rows([])
    assert tracker.close(60).problem is None
    wait_for(lambda: shown(client, "others")["lost"][0] == "KILLED", "the lost run to end", 60)
    found = shown(client, "others")
    assert found["lost"] == ("KILLED", int(SEEN * 1000))
    # `again` is an extended run by now: its directory says nothing of the run that was extended.
    assert {name: found[name][0] for name in ("alive", "elsewhere", "again", "new")} == dict.fromkeys(
        ("alive", "elsewhere", "again", "new"), "RUNNING"
    )
    assert shown(client, "another experiment")["other"][0] == "RUNNING"


def test_the_command_status_settles_it(
    tmp_path: Path, store: str, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.cli.app import call

    run = begun(tmp_path / "asked", job(store, "asked"), [killed()])
    with pytest.raises(SystemExit) as end:
        call(["status", run.uri])
    assert end.value.code == 0
    said = capsys.readouterr().out.splitlines()
    assert (said[0], said[-1]) == ("demo: lost, step 3 of 5", "MLflow shows it as KILLED now")
    assert shown(client, "asked")["asked"][0] == "KILLED"
    with pytest.raises(SystemExit):
        call(["status", run.uri, "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "lost"

"""The main job on embedded Ray, from text to an exported model, as a user runs it."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

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
    wait_for,
    weights,
    write_job,
)

Quiet = tuple[Path, Path, subprocess.CompletedProcess[str]]


def test_the_run_directory_is_as_designed(quiet: Quiet) -> None:
    _, run, done = quiet
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    names = {p.name for p in run.iterdir() if not p.name.startswith(".")}
    assert names == {
        "job.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "nodes.jsonl", "status.json", "summary.json",
        "report.html", "checkpoints", "excerpt", "export", "logs",
    }  # fmt: skip
    assert {p.name for p in (run / "checkpoints").iterdir()} == {
        "step-00000004", "step-00000008", "step-00000012", "LATEST", "ATTEMPT",
    }  # fmt: skip
    metrics = rows(run)
    assert [row["step"] for row in metrics] == list(range(1, 13))
    wanted = "step loss lr grad_norm tokens tokens_per_second step_seconds samples layout attempt"
    assert set(wanted.split()) <= set(metrics[0])
    assert metrics[-1]["tokens"] == 12 * 8 * 32
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
    assert abs(metrics[0]["loss"] - math.log(512)) < 0.5
    phases = [event["phase"] for event in rows(run, "events.jsonl")]
    assert phases == ["prepare", "wait", "start", "train", "stop", "export", "done"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary == printed["summary"]
    assert summary["receipt"] == metrics[-1]["samples"]
    manifest = json.loads((run / "checkpoints/step-00000012/manifest.json").read_text())
    assert manifest["receipt"] == summary["receipt"]
    assert manifest["position"] == 12 * 8
    assert summary["ledger"]["wall_seconds"] == pytest.approx(sum(summary["ledger"]["seconds"].values()))
    assert "<svg" in (run / "report.html").read_text()


def test_the_ledger_has_every_second_from_the_command_to_the_prompt(quiet: Quiet) -> None:
    folder, run, _ = quiet
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    seconds = float((folder / "seconds.txt").read_text())
    assert (
        abs(seconds - sum(ledger["seconds"].values())) < 2.0
    )  # one, and the end of Python on a busy machine


def test_the_export_loads_in_transformers(quiet: Quiet) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, run, _ = quiet
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    ids = tokenizer("The assert statement", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], 512)
    assert json.loads((run / "export/export.json").read_text())["logits_difference"] < 1e-4


def test_mlflow_has_one_run_with_every_step(quiet: Quiet) -> None:
    from mlflow import MlflowClient

    folder, run, _ = quiet
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (logged,) = client.search_runs([experiment.experiment_id])
    delivered = json.loads((run / "summary.json").read_text())["tracking"]
    assert delivered == {"missing_rows": 0, "problem": None}
    assert logged.info.status == "FINISHED"
    history = client.get_metric_history(logged.info.run_id, "loss")
    found = sorted((m.step, m.value) for m in history)
    assert found == [(row["step"], row["loss"]) for row in rows(run)]
    assert logged.data.params["train.global_batch"] == "8"
    (node,) = {row["node"] for row in rows(run, "nodes.jsonl")}
    assert logged.data.metrics[f"system/{node}/system_memory_usage_percentage"] > 0
    artefacts = {a.path for a in client.list_artifacts(logged.info.run_id)}
    assert {"plan.json", "report.html", "job.yaml", "summary.json"} <= artefacts


def test_a_finished_run_is_left_alone(quiet: Quiet) -> None:
    folder, run, _ = quiet
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    again = orchestrator("run", folder / "job.yaml", cwd=folder)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before


def test_verify_resume_replays_the_same_bits(quiet: Quiet) -> None:
    folder, run, _ = quiet
    found = orchestrator("verify-resume", run, "--steps", 3, "--step", 4, "--json", cwd=folder)
    assert found.returncode == 0, found.stderr
    verdict = json.loads(found.stdout)
    assert [row["step"] for row in verdict["rows"]] == [5, 6, 7]
    assert verdict["same"]


def same_job(folder: Path) -> dict[str, Any]:
    """The quiet run's job, over the same prepared data."""
    document = job(str(folder / "corpus" / "topics.txt"))
    document["data"]["cache"] = str(folder / "runs" / "_data")
    return document


def killed_at(step: int, folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The quiet run's job, killed with its whole tree as rank 0 begins the step; the job file and its run directory."""
    path, run = write_job(tmp_path, same_job(folder)), tmp_path / "runs" / "small"
    with started("run", path, "--fault", f"stop@0:{step}", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(run, 0)), f"rank 0 to freeze at step {step}")
        kill_tree(process.pid)
    return path, run


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 7])
def test_killing_the_whole_tree_changes_no_bit(quiet: Quiet, tmp_path: Path, step: int) -> None:
    folder, quiet_run, _ = quiet
    path, run = killed_at(step, folder, tmp_path)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(quiet_run)
    assert weights(run, 12) == weights(quiet_run, 12)


@pytest.mark.slow
def test_what_was_killed_goes_on_until_a_commit_and_from_there_under_another_layout(
    quiet: Quiet, tmp_path: Path
) -> None:
    """After the whole tree was killed no bit is another one; under the other layout the samples are the same."""
    folder, quiet_run, _ = quiet
    path, run = killed_at(7, folder, tmp_path)
    half = orchestrator("run", path, "--until", 10, cwd=tmp_path)
    assert half.returncode == 3, half.stderr
    assert json.loads((run / "summary.json").read_text())["state"] == "stopped"
    assert (run / "checkpoints/step-00000010/manifest.json").exists()
    assert curve(run) == curve(quiet_run)[:10]
    assert weights(run, 8) == weights(quiet_run, 8)
    options = ["--set", "resources.workers=1", "--set", "parallel.micro_batch=2"]
    done = orchestrator("run", path, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["layout"] for row in rows(run)] == ["dp2 zero0 mb4"] * 10 + ["dp1 zero0 mb2"] * 2
    ours, theirs = curve(run), curve(quiet_run)
    assert [row[3] for row in ours] == [row[3] for row in theirs]
    assert ours[:10] == theirs[:10]
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], rel=1e-5)

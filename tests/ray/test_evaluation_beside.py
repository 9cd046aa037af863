"""Evaluations beside a run on real Ray nodes: on the one that it leaves free, and where it leaves none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, orchestrator, rows, write_job, write_text
from ray.cluster_utils import Cluster


def evaluated(text: str, where: str, workers: int) -> dict[str, Any]:
    document = job(text)
    document["data"]["validation"] = {"share": 0.34}
    document["resources"] = {"workers": workers}
    document["parallel"] = {"micro_batch": 2}
    document["evaluate"] = {"every": 4, "where": where}
    return document


def evaluations(run: Path) -> list[Any]:
    return [(row["step"], row["sets"]) for row in rows(run, "evals.jsonl")]


def reasons(run: Path) -> list[str]:
    return [event["reason"] for event in rows(run, "events.jsonl")]


@pytest.mark.slow
def test_on_a_node_that_is_left_and_where_none_is(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes of a processor each: a run of one worker leaves one, a run of two none, which says so once."""
    text, found = write_text(tmp_path / "corpus"), {}
    for name, where, workers in (("gang", "gang", 1), ("beside", "beside", 1), ("full", "beside", 2)):
        document = evaluated(text, where, workers) | {"name": name}
        path = write_job(tmp_path, document, f"{name}.yaml")
        done = orchestrator("run", path, "--address", cluster.address, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found[name] = tmp_path / "runs" / name
        assert [step for step, _ in evaluations(found[name])] == [4, 8, 12]
    assert evaluations(found["beside"]) == evaluations(found["gang"])
    assert curve(found["beside"]) == curve(found["gang"])
    waits = "there is no room for one more worker of 1 CPU"
    assert sum(waits in reason for reason in reasons(found["full"])) == 1
    assert not any("failed" in reason for name in found for reason in reasons(found[name]))
    phases = [event["phase"] for event in rows(found["full"], "events.jsonl")]
    assert phases[-3:] == ["stop", "evaluate", "done"]


@pytest.mark.slow
def test_on_this_machine_there_is_room_for_it(tmp_path: Path) -> None:
    """The Ray that a command starts by itself has one worker more."""
    document = evaluated(write_text(tmp_path / "corpus"), "beside", 2)
    document["checkpoint"] |= {"export": "hf", "keep": 1, "keep_best": "validation.loss"}
    done = orchestrator("run", write_job(tmp_path, document), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "small"
    assert [step for step, _ in evaluations(run)] == [4, 8, 12]
    assert not any("there is no room" in reason for reason in reasons(run))
    best = min(rows(run, "evals.jsonl"), key=lambda row: row["sets"]["validation"]["loss"])["step"]
    assert json.loads((run / "summary.json").read_text())["export"]["step"] == best

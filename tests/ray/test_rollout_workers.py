"""Rollout workers on real Ray nodes: one is lost with its node, and the run has the bits of one without any."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import curve, job, rows, started, status, wait_for, weights, write_job
from letters import letters, write_tokenizer
from local_run import LocalGang, drive_here
from ray.cluster_utils import Cluster

from orchestrator.train.rollouts.stored_rollouts import read_kept

STEPS = 12
LONG = 600
"""Seconds that a busy machine may take."""


def document(folder: Path, name: str) -> dict[str, Any]:
    """A job of one training worker."""
    found = job(str(folder / "prompts.jsonl"), steps=STEPS, global_batch=16, optimizer={"lr": 1e-2})
    found["name"] = name
    found["workload"] |= {"objective": "grpo"}
    found["data"] = {
        "sources": [{"uri": str(folder / "prompts.jsonl"), "field": {"prompt": "question"}}],
        "tokenizer": str(folder), "sequence_length": 64,
    }  # fmt: skip
    found["resources"] = {"workers": 1}
    found["rollout"] = {"group": 4, "max_tokens": 40, "together": 1, "keep_every": 1}
    found["rewards"] = [{"kind": "length", "length": {"least": 8, "most": 20, "margin": 10}}]
    found["checkpoint"]["every"] = 3
    return found


@pytest.mark.slow
def test_a_rollout_worker_goes_with_its_node_and_comes_with_another_and_changes_no_bit(
    cluster: Cluster, new_node: Callable[[], None], tmp_path: Path
) -> None:
    """On two nodes of a processor each: one trains, the other generates and is lost. Meanwhile the ranks wait.

    Asked for in AReaL#606.
    """
    lines = [json.dumps({"question": letters(n)}) for n in range(200)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(tmp_path, template=False)
    quiet, run = tmp_path / "quiet", tmp_path / "runs/lost"
    drive_here(document(tmp_path, "lost"), str(quiet), tmp_path / "cache", gang=lambda: LocalGang([1]))
    found = document(tmp_path, "lost")
    found["data"]["cache"] = str(tmp_path / "cache")
    found["rollout"]["workers"] = 1
    slowed = ["--fault", "slow@0:2=8"]  # so that the run still goes on when the node is gone
    path = write_job(tmp_path, found, "lost.yaml")
    with started("run", path, "--address", cluster.address, *slowed, cwd=tmp_path) as process:
        wait_for(lambda: status(run).get("step", 0) >= 1, "the first step", LONG)
        (lost,) = (worker["node"] for worker in status(run)["rollout_workers"])
        cluster.remove_node(
            next(n for n in cluster.worker_nodes if n.node_ip_address == lost), allow_graceful=False
        )
        wait_for(lambda: not status(run).get("rollout_workers"), "its end", LONG)
        new_node()
        assert process.wait(timeout=LONG) == 0, (tmp_path / "output.txt").read_text()
    assert curve(run) == curve(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    assert {row["attempt"] for row in rows(run)} == {1}
    for step in (1, 3, STEPS):
        assert read_kept(str(run), step) == read_kept(str(quiet), step)
    told = [event["reason"] for event in rows(run, "events.jsonl") if "rollout worker" in event["reason"]]
    assert any(lost in line for line in told), told


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_controllers_and_nodes_that_are_lost_change_no_bit_of_stale_rollouts(
    seed: int, cluster: Cluster, new_node: Callable[[], None], tmp_path: Path
) -> None:
    """The controller is killed twice, the node of the rank and the node of a rollout worker once each, at random steps.

    Asked for in verl#1314 and AReaL#606.
    """
    draw = random.Random(seed)
    faults = ["controller", "controller", "ranks", "rollout_workers"]
    draw.shuffle(faults)
    at = sorted(draw.sample(range(1, STEPS - 1), len(faults)))
    lines = [json.dumps({"question": letters(n)}) for n in range(200)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(tmp_path, template=False)
    found = document(tmp_path, "stale")
    found["rollout"]["staleness"] = 1
    quiet, run = tmp_path / "quiet", tmp_path / "runs/stale"
    drive_here(found, str(quiet), tmp_path / "cache", gang=lambda: LocalGang([1]))
    found["data"]["cache"] = str(tmp_path / "cache")
    found["rollout"]["workers"] = {"min": 1, "max": 2}
    path = write_job(tmp_path, found, "stale.yaml")
    new_node()
    # Each fault finds the run within a step that takes long, in whichever attempt.
    slowed = [word for attempt in range(1, 9) for word in ("--fault", f"slow@0:1/{attempt}=3")]
    with started("run", path, "--address", cluster.address, *slowed, cwd=tmp_path) as process:
        for step, fault in zip(at, faults, strict=True):
            wait_for(
                lambda step=step, fault=fault: (
                    status(run).get("step", 0) >= step and (fault == "controller" or status(run).get(fault))
                ),
                f"step {step} and {fault}",
                LONG,
            )
            if fault == "controller":
                psutil.Process(status(run)["pid"]).kill()
                continue
            lost = status(run)[fault][0]["node"]
            cluster.remove_node(
                next(n for n in cluster.worker_nodes if n.node_ip_address == lost), allow_graceful=False
            )
            new_node()
        assert process.wait(timeout=LONG) == 0, (tmp_path / "output.txt").read_text()
    assert curve(run) == curve(quiet), (at, faults)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    for step in range(1, STEPS + 1):
        assert read_kept(str(run), step) == read_kept(str(quiet), step)
    died = [event for event in rows(run, "events.jsonl") if "controller_died" in event]
    assert len(died) == 2
    assert json.loads((run / "summary.json").read_text())["rollout_worker_hours"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nodes_that_are_lost_while_answers_are_generated_change_no_bit(
    cluster: Cluster, new_node: Callable[[], None], tmp_path: Path
) -> None:
    """The node of a rollout worker, then that of a rank. The rollout workers freeze before each loss, so that no step
    can end.

    Asked for in verl#1314.
    """
    lines = [json.dumps({"question": letters(n)}) for n in range(400)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(tmp_path, template=False)
    found = document(tmp_path, "generating")
    found["train"] |= {"global_batch": 64, "determinism": "bitwise", "virtual_shards": 4}
    found["parallel"] = {"micro_batch": 16}
    quiet, run = tmp_path / "quiet", tmp_path / "runs/generating"
    drive_here(found, str(quiet), tmp_path / "cache", gang=lambda: LocalGang([1]))
    found["data"]["cache"] = str(tmp_path / "cache")
    found["resources"] = {"workers": {"min": 1, "max": 2}}
    found["rollout"]["workers"] = {"min": 1, "max": 2}
    path = write_job(tmp_path, found, "generating.yaml")
    new_node()
    new_node()
    lost = {}
    with started("run", path, "--address", cluster.address, cwd=tmp_path) as process:
        for step, victims in ((2, "rollout_workers"), (6, "ranks")):
            frozen = frozen_while_generating(run, step)
            lost[victims] = status(run)[victims][-1]["node"]
            cluster.remove_node(
                next(n for n in cluster.worker_nodes if n.node_ip_address == lost[victims]),
                allow_graceful=False,
            )
            for worker in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.resume()
            new_node()
        assert process.wait(timeout=LONG) == 0, (tmp_path / "output.txt").read_text()
    assert curve(run) == curve(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    for step in range(1, STEPS + 1):
        assert read_kept(str(run), step) == read_kept(str(quiet), step)
    told = json.dumps(rows(run, "events.jsonl"))
    assert all(node in told for node in lost.values()), told
    attempts = {row["step"]: row["attempt"] for row in rows(run)}
    assert attempts[3] == 1, "the loss of a rollout worker ends no attempt"
    assert attempts[STEPS] > 1


def frozen_while_generating(run: Path, step: int) -> list[psutil.Process]:
    """Freeze the rollout workers of a run in the generation of a step after `step`, and return their processes."""

    def last() -> int:
        return max(row["step"] for row in rows(run))

    wait_for(
        lambda: status(run).get("step", 0) >= step and status(run)["rollout_workers"], f"step {step}", LONG
    )
    while True:
        workers = [psutil.Process(worker["pid"]) for worker in status(run)["rollout_workers"]]
        for worker in workers:
            worker.suspend()
        before = last()
        # Longer than training on answers that are all there, and shorter than a worker may be silent.
        time.sleep(1.2)
        if workers and last() == before:
            return workers
        for worker in workers:
            worker.resume()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_gang_that_could_use_every_node_leaves_rollout_workers_their_room(
    cluster: Cluster, new_node: Callable[[], None], tmp_path: Path
) -> None:
    """On four processors, with one to four training workers: the gang is prepared for all, and begins with fewer."""
    new_node()
    new_node()
    lines = [json.dumps({"question": letters(n)}) for n in range(200)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(tmp_path, template=False)
    found = document(tmp_path, "room")
    found["resources"] = {"workers": {"min": 1, "max": 4}}
    found["rollout"]["workers"] = {"min": 1, "max": 2}
    run = tmp_path / "runs/room"
    path = write_job(tmp_path, found, "room.yaml")
    with started("run", path, "--address", cluster.address, cwd=tmp_path) as process:
        assert process.wait(timeout=LONG) == 0, (tmp_path / "output.txt").read_text()
    told = rows(run)
    assert [row["step"] for row in told] == list(range(1, STEPS + 1))
    assert {row["attempt"] for row in told} == {1}

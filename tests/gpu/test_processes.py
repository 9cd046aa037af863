"""Forks, deaths and runs on a GPU. In the order in which one is best spent on them; `test_computation` comes after."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import job, write_text
from prepared import prepare_here, with_data

from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import FINISHED, Bundle, RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.process_gang import ProcessGang
from cluster.workers.worker_context import RankInfo
from orchestrator.config.spec import parse
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import Task

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = 1 << 20


@pytest.fixture
def gang() -> Iterator[ProcessGang]:
    found = ProcessGang()
    yield found
    found.close()


def ended(gang: ProcessGang, seconds: float = 120.0) -> list[RankStatus]:
    """The ranks, once all have ended."""
    deadline = time.monotonic() + seconds
    while True:
        ranks = gang.poll(0, wait=0.1).ranks
        if all(rank.state in FINISHED for rank in ranks):
            return list(ranks)
        assert time.monotonic() < deadline, ranks


def bundle(device: str) -> Bundle:
    return Bundle(gpu=1 if device == "cuda" else 0)


@pytest.mark.parametrize("device", DEVICES)
def test_forks_allocate_and_the_fork_server_has_no_context(gang: ProcessGang, device: str) -> None:
    for _ in range(2):
        gang.start(2, bundle(device), "gpu_targets:allocate", {"device": device, "bytes": SMALL})
        assert [rank.result and rank.result["mean"] for rank in ended(gang)] == [1.0, 1.0]
    assert gang._fork_server._process is not None
    opened = Path(f"/proc/{gang._fork_server._process.pid}/fd")
    # What a context needs; counting the GPUs, which is harmless, leaves the driver's control device open.
    assert not [link for link in opened.iterdir() if "nvidia-uvm" in str(link.resolve())]


def task_on(folder: Path, device: str, steps: int = 20) -> dict[str, Any]:
    """A run in bf16 on that device."""
    text = write_text(folder, 20_000)
    document = job(text, steps=steps, precision="bf16") | {
        "resources": {"workers": 1, "per_worker": {"cpu": 1, "gpu": int(device == "cuda")}}
    }
    spec = parse(document)
    data = prepare_here(spec, str(folder / "cache"))
    layout = Layout(micro_batch=4).to_json()
    return Task(
        spec.model_dump(mode="json"), layout, str(folder / "run"), data, 1, None, steps, token="test"
    ).to_json()


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_in_bf16(tmp_path: Path, gang: ProcessGang, device: str) -> None:
    gang.start(1, bundle(device), "gpu_targets:train", task_on(tmp_path, device))
    (rank,) = ended(gang, 300)
    assert rank.state == "done", rank.error
    rows = rank.result["rows"]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["loss"] < rows[0]["loss"]
    if device == "cuda":
        most = max(row["memory_bytes"] for row in rows)
        print({key: rank.result[key] for key in ("driver", "reserved", "seconds")} | {"rows": most})
        assert 0 < most <= rank.result["reserved"] <= rank.result["driver"]


@pytest.mark.gpu
def test_the_same_through_embedded_ray(tmp_path: Path) -> None:
    document = job(write_text(tmp_path, 20_000), steps=20, precision="bf16") | {
        "resources": {"workers": 1, "per_worker": {"cpu": 1, "gpu": 1}}
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(with_data(document, tmp_path / "cache")))
    words = [sys.executable, "-m", "orchestrator", "run", "job.yaml", "--run-dir", "run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stands_by", [False, True])
def test_time_by_phase_from_the_fork_to_the_second_step(device: str, stands_by: bool) -> None:
    """With a standby as after a failure, and without one."""
    target, server = "gpu_targets:begin", HeartbeatServer("127.0.0.1")
    fork_server = ForkServer(target, stands_by)
    try:
        fork_server.exits()  # once everything is imported
        time.sleep(30 if device == "cuda" and stands_by else 1)
        info = dataclasses.asdict(RankInfo(0, 1, 0, "127.0.0.1"))
        config = {"device": device, "launched": time.time()}
        given = {"rank_info": info, "target": target, "config": config, "server": server.address}
        fork_server.launch(**given, token=server.expect(["local"]))
        deadline = time.monotonic() + 120
        while (rank := server.poll(0, 0.1).ranks[0]).state not in FINISHED:
            assert time.monotonic() < deadline
        assert rank.state == "done", rank.error
        print(f"standby {stands_by}: {rank.result}")
        assert list(rank.result.values()) == sorted(rank.result.values())
    finally:
        fork_server.close()
        server.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_rank_is_confirmed_dead_and_its_memory_comes_back(gang: ProcessGang, device: str) -> None:
    size = int(torch.cuda.mem_get_info()[0] * 0.75) if device == "cuda" else SMALL
    for _ in range(2):  # the second finds the memory free
        given = {"device": device, "bytes": size, "kills": True}
        gang.start(1, bundle(device), "gpu_targets:allocate", given)
        (rank,) = ended(gang, 180)
        began = time.monotonic()
        gang.stop()
        print(f"{size / 1e9:.1f} GB: gone {time.monotonic() - began:.2f} s after its death was seen")
        assert (rank.state, rank.cause.end, rank.cause.code, rank.step) == ("dead", "exited", -9, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_out_of_memory_in_the_first_step_is_told_at_once(gang: ProcessGang, device: str) -> None:
    gang.start(1, bundle(device), "gpu_targets:runs_out", {"device": device})
    (rank,) = ended(gang, 60)
    assert (rank.state, rank.cause.kind) == ("failed", "gpu_memory" if device == "cuda" else "memory")


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_over_gloo_agree_with_one(gang: ProcessGang, device: str) -> None:
    given = {"device": device, "of": {"model": "gpt-tiny", "train": {"precision": "bf16"}}}
    found = []
    for world in (1, 2):
        gang.start(world, bundle(device), "gpu_targets:over_gloo", given)
        ranks = ended(gang)
        assert [rank.state for rank in ranks] == ["done"] * world, [rank.error for rank in ranks]
        found.append(ranks[0].result)
    assert found[1] == pytest.approx(found[0], rel=2**-7)

"""One road: whatever dies, the run continues from its last checkpoint and stays the same run."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from jobs import (
    command,
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
from ray.cluster_utils import Cluster

from cluster.local.ray_session import connected_ray
from orchestrator.config.packages import PACKAGES
from orchestrator.launch.controller_actor import controller_of
from orchestrator.storage.run_directory import RunDir

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.fixture
def quiet(quiet: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> Path:
    """The run directory of a run that nothing disturbs."""
    _, run, done = quiet
    assert done.returncode == 0, done.stderr
    return run


def same_job(quiet: Path, tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """The quiet run's job in another folder, over the same prepared data; the job file and its run directory."""
    document = job(str(quiet.parents[1] / "corpus" / "topics.txt"))
    document["data"]["cache"] = str(quiet.parent / "_data")
    document |= changes
    return write_job(tmp_path, document), tmp_path / "runs" / "small"


def faults(run: Path) -> list[str]:
    """The first faults on record."""
    return [event["first_fault"] for event in rows(run, "events.jsonl") if event["first_fault"]]


@pytest.mark.slow
def test_a_killed_worker_costs_the_steps_since_the_commit_and_no_bit(quiet: Path, tmp_path: Path) -> None:
    path, run = same_job(quiet, tmp_path)
    done = orchestrator("run", path, "--fault", "kill@1:7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)
    (fault,) = faults(run)
    assert fault.startswith("rank 1 on 127.0.0.2 died")
    (stop,) = [e for e in rows(run, "events.jsonl") if e["first_fault"]]
    # Rank 1 dies as it begins step 7, when rank 0 may not have told of step 6 yet; and the commit at step 4,
    # milliseconds before, may still have been on its way when its writer was killed.
    assert stop["step"] in (5, 6)
    assert stop["lost_steps"] in (stop["step"] - 4, stop["step"])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["attempts"] == 2
    assert summary["ledger"]["seconds"]["lost_work"] > 0


@pytest.mark.slow
def test_an_exception_that_repeats_at_the_same_step_ends_the_run(quiet: Path, tmp_path: Path) -> None:
    """Without an attempt in the fault it would strike once; two faults strike in two attempts."""
    path, run = same_job(quiet, tmp_path)
    words = ["--fault", "raise@0:6", "--fault", "raise@0:6/2"]
    done = orchestrator("run", path, *words, "--json", cwd=tmp_path)
    assert done.returncode == 1
    printed = json.loads(done.stdout)
    assert "InjectedFault: injected at rank 0, step 6" in printed["line"]
    assert "it would repeat" in printed["line"]
    assert json.loads((run / "summary.json").read_text())["state"] == "failed"
    again = orchestrator("run", path, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert curve(run) == curve(quiet)


@pytest.mark.slow
def test_after_nan_the_run_goes_on_without_the_samples_of_that_step(quiet: Path, tmp_path: Path) -> None:
    path, run = same_job(quiet, tmp_path)
    done = orchestrator("run", path, "--fault", "nan@1:7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (stop,) = [event for event in rows(run, "events.jsonl") if event["first_fault"]]
    assert "NonFinite: loss is nan at step 7, samples from position 48" in stop["first_fault"]
    assert stop["skipped"] == {"step": 7, "start": 48, "count": 8, "lr_scale": 1.0}
    assert curve(run)[:6] == curve(quiet)[:6]
    assert curve(run)[6] != curve(quiet)[6]
    replayed = orchestrator("verify-resume", run, "--step", 4, "--steps", 4, cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr


@pytest.mark.slow
def test_nan_whatever_is_left_out_ends_the_run(quiet: Path, tmp_path: Path) -> None:
    path, _ = same_job(quiet, tmp_path)
    words = [word for n in range(1, 5) for word in ("--fault", f"nan@0:7/{n}")]
    done = orchestrator("run", path, *words, "--json", cwd=tmp_path)
    assert done.returncode == 1
    printed = json.loads(done.stdout)
    assert "NonFinite: loss is nan at step 7, samples from position 96" in printed["line"]
    assert "train.stability.retries 3 are spent" in printed["line"]


@pytest.mark.slow
def test_a_corrupted_commit_is_passed_over(quiet: Path, tmp_path: Path) -> None:
    path, run = same_job(quiet, tmp_path)
    half = orchestrator("run", path, "--until", 8, cwd=tmp_path)
    assert half.returncode == 3, half.stderr
    shard = next((run / "checkpoints/step-00000008").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)
    told = [event["reason"] for event in rows(run, "events.jsonl")]
    assert any("a commit is passed over: step 8" in reason for reason in told)


@pytest.mark.slow
def test_snapshots_in_the_memory_of_other_nodes_lose_no_step(
    cluster: Cluster, quiet: Path, tmp_path: Path
) -> None:
    """No commit to the store is due before the fault; what the holders keep is used, and is whole.

    Asked for in ray#66225, torchft#329 and transformers#38961.
    """
    checkpoint = {"every": 100, "keep": 3, "snapshot_every": 1, "export": None}
    path, run = same_job(quiet, tmp_path, checkpoint=checkpoint)
    words = ["run", path, "--address", cluster.address]
    # Pauses, for at milliseconds a step generations may be on their way for several steps.
    given = ("slow@1:4=1", "slow@1:5=1", "slow@1:6=1", "kill@1:7")
    done = orchestrator(*words, *[word for fault in given for word in ("--fault", fault)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (fault,) = faults(run)
    assert fault.startswith("rank 1 on 127.0.0.12 died")
    starts = [event["reason"] for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    restored = int(starts[1].rsplit(" ", 1)[1])
    assert restored >= 4
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-00000012"]


@pytest.mark.contract
def test_a_lost_node_makes_the_gang_smaller(cluster: Cluster, quiet: Path, tmp_path: Path) -> None:
    """In a step that lasts: a rank that were frozen would be noticed before a busy machine has removed its node.

    Asked for in skypilot#3907, dstack#2123 and verl#1314.
    """
    path, run = same_job(quiet, tmp_path)
    words = ["run", path, "--address", cluster.address, "--fault", "slow@1:7=60"]
    with started(*words, cwd=tmp_path) as process:
        # The commit is written beside the steps: without this wait the node could take it along.
        wait_for((run / "checkpoints/step-00000004/manifest.json").exists, "the commit at step 4")
        lost = next(r["node"] for r in status(run)["ranks"] if r["rank"] == 1)
        node = next(n for n in cluster.worker_nodes if n.node_ip_address == lost)
        cluster.remove_node(node, allow_graceful=False)
        assert process.wait(timeout=240) == 0
    layouts = [row["layout"] for row in rows(run)]
    kept = layouts.count("dp2 zero0 mb4")  # more than the commit has, if the other node had a later snapshot
    assert 4 <= kept < 7
    assert layouts == ["dp2 zero0 mb4"] * kept + ["dp1 zero0 mb8"] * (12 - kept)
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(quiet)]
    assert [row[1] for row in curve(run)] == pytest.approx([row[1] for row in curve(quiet)], rel=1e-5)


@pytest.mark.slow
def test_a_node_that_computes_wrongly_is_drained_and_the_run_goes_on_without_it(
    cluster: Cluster, quiet: Path, tmp_path: Path
) -> None:
    """Rank 1 flips a bit from step 6 on, which step 8 shows. The second attempt lasts, so that Ray can end the node."""
    parts = {"workers": {"min": 1, "max": 2}, "verify": {"every": 4}}
    path, run = same_job(quiet, tmp_path, resources=parts)
    words = ["run", path, "--address", cluster.address, "--fault", "product@1:6", "--fault", "slow@0:5/2=2"]
    done = orchestrator(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = rows(run, "events.jsonl")
    (fault,) = [event for event in events if event["first_fault"]]
    (wrong,) = fault["wrong_nodes"]
    lines = [event["reason"] for event in events if "computes wrongly" in event["reason"]]
    assert lines == [
        f"{wrong}, which computes wrongly, is drained: Ray starts nothing more there, and ends the node"
    ]
    (last,) = {row["layout"] for row in rows(run)[-4:]}
    assert last.startswith("dp1 ")
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(quiet)]
    with connected_ray(cluster.address, packages=PACKAGES):
        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    assert wrong not in alive
    assert len(alive) == 2, "the head and the other node"


@pytest.mark.slow
def test_a_stop_while_the_controller_starts_is_heard(cluster: Cluster, tmp_path: Path) -> None:
    """It would go on without the command, which is over."""
    document = job(write_text(tmp_path / "corpus", 20_000))
    path, run = write_job(tmp_path, document), tmp_path / "runs" / "small"
    with started("run", path, "--address", cluster.address, cwd=tmp_path) as process:
        output = tmp_path / "output.txt"
        wait_for(
            lambda: "starting the run's controller" in output.read_text(), "the controller to be asked for"
        )
        time.sleep(0.4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 130, output.read_text()
    assert json.loads((run / "summary.json").read_text())["state"] == "stopped"
    assert rows(run, "events.jsonl")[-1]["reason"] == "stopped by the user"
    assert not list(run.glob("checkpoints/*/manifest.json"))


@pytest.mark.contract
def test_the_driver_may_die_and_another_attaches_and_then_the_controller_may_die(
    cluster: Cluster, quiet: Path, tmp_path: Path
) -> None:
    path, run = same_job(quiet, tmp_path)
    words = ["run", path, "--address", cluster.address]
    with started(*words, "--fault", "stop@0:6", "--fault", "stop@1:11/2", cwd=tmp_path) as driver:
        wait_for(lambda: is_frozen(rank_pid(run, 0)), "rank 0 to freeze at step 6")
        controller, frozen = status(run)["pid"], rank_pid(run, 0)
        driver.kill()
        driver.wait(timeout=30)
        attached = subprocess.Popen(command(*words), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        kill_tree(frozen)
        wait_for(lambda: is_frozen(rank_pid(run, 1)), "rank 1 to freeze at step 11")
        assert status(run)["pid"] == controller
        assert not any(event["reason"].startswith("resumed") for event in rows(run, "events.jsonl"))
        frozen = rank_pid(run, 1)
        psutil.Process(controller).kill()
        _, told = attached.communicate(timeout=240)
    assert attached.returncode == 0, told
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)
    assert any(event["reason"].startswith("resumed") for event in rows(run, "events.jsonl"))
    assert not psutil.pid_exists(frozen)
    # A controller whose run has ended stays for a while; if it dies then, the run is not trained once more.
    ended = status(run)["pid"]
    run.rename(tmp_path / "moved")
    psutil.Process(ended).kill()
    with connected_ray(cluster.address, packages=PACKAGES):
        controller = controller_of(RunDir(str(run)))
        assert controller is not None

        def told() -> dict[str, Any] | None:
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):  # while it is being started
                return ray.get(controller.status.remote(), timeout=60)["error"]
            return None

        wait_for(told, "Ray to start it again")
        error = told()
    assert error is not None
    assert "the run directory is gone" in error["line"]
    assert not run.exists()


@pytest.mark.slow
def test_ray_train_restarts_the_workers_and_they_go_on_from_our_commit(quiet: Path, tmp_path: Path) -> None:
    """The same rank program in a `TorchTrainer`, by the example: the same bits, and a run directory like ours."""
    path, run = same_job(quiet, tmp_path)
    words = [sys.executable, str(EXAMPLE), str(path), "--fault", "kill@1:11"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done: step 12" in done.stdout
    starts = [event for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    assert [event["attempt"] for event in starts] == [1, 2]
    assert starts[1]["reason"].startswith("2 workers in fp32 from the commit at step ")
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)


@pytest.mark.slow
def test_a_dead_tracking_server_neither_stops_nor_fails_a_run(quiet: Path, tmp_path: Path) -> None:
    tracking = {"uri": "http://127.0.0.1:9", "experiment": "tests"}
    path, run = same_job(quiet, tmp_path, tracking=tracking)
    done = orchestrator("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(quiet)
    assert json.loads((run / "summary.json").read_text())["tracking"]["missing_rows"] == 12
    assert "MLflow lacks" in done.stderr


@pytest.mark.slow
def test_ray_s_own_death_on_this_machine_is_seen_and_the_same_command_goes_on(
    quiet: Path, tmp_path: Path
) -> None:
    path, run = same_job(quiet, tmp_path)
    with started("run", path, "--fault", "stop@1:7", cwd=tmp_path) as process:
        wait_for(lambda: is_frozen(rank_pid(run, 1)), "rank 1 to freeze at step 7")
        raylet = next(p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "raylet")
        raylet.kill()
        assert process.wait(timeout=200) == 0
    assert "Ray's raylet has died; Ray is started again" in (tmp_path / "output.txt").read_text()
    assert curve(run) == curve(quiet)
    assert weights(run, 12) == weights(quiet, 12)

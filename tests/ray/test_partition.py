"""A network that is cut, for real: nodes in namespaces, one of which neither hears nor is heard. It is the same run.

What is cut off cannot be ended by anybody, and it may still reach the storage.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import command, curve, job, orchestrator, rows, status, wait_for, weights, write_job, write_text
from partition import Network, network, unable

from cluster.workers.device_limits import CPU
from cluster.workers.rank_process import FENCE_TIMEOUT
from orchestrator.checkpoint.commit_store import Store

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unable()), reason=unable())]

STEPS = 40
SLOW = 0.2
"""Seconds that a step takes longer, so that a network can be cut at one."""
LATE = 1.0
"""Seconds for the beat before the cut and for the controller's own look, on a machine that does all at once."""
ENDED = FENCE_TIMEOUT + 30.0
"""Seconds for what is cut off to end by itself."""


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    document = job(write_text(folder / "corpus"), steps=STEPS)
    done = orchestrator("run", write_job(folder, document), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "small"


@contextmanager
def under_way(
    net: Network, quiet: Path, folder: Path, driver: int = 0, **resources: Any
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The quiet run's job on that network at step 6 or soon after: its run directory and its driver."""
    document = job(str(quiet.parents[1] / "corpus" / "topics.txt"), steps=STEPS)
    document["data"]["cache"] = str(quiet.parent / "_data")
    document["resources"] |= resources
    slow = [word for attempt in (1, 2) for word in ("--fault", f"slow@0:1/{attempt}={SLOW}")]
    words = command("run", write_job(folder, document), "--address", net.address, *slow)
    run = folder / "runs" / "small"
    with open(folder / "output.txt", "a") as output:
        process = subprocess.Popen(net.spaces[driver].command(*words), cwd=folder, stderr=output, text=True)
    try:
        wait_for(lambda: status(run).get("step", 0) >= 6 or process.poll() is not None, "step 6", 120)
        # The commit is written beside the steps.
        wait_for((run / "checkpoints/step-00000004/manifest.json").exists, "the commit at step 4")
        yield run, process
    finally:
        process.kill()
        process.wait()


def node_of(net: Network, run: Path, rank: int) -> int:
    """The number of the node that a rank is on."""
    return next(net.node_at(r["node"]) for r in status(run)["ranks"] if r["rank"] == rank)


def ours(net: Network, node: int) -> Callable[[], list[str]]:
    """What is left of the processes of ranks on a node that are there now: ranks, what forks them, what saves."""
    modules = ("cluster.workers.fork_server", "orchestrator.checkpoint.sidecar")
    there = [p for p in net.spaces[node].processes() if any(m in p.cmdline() for m in modules)]
    assert there

    def left() -> list[str]:
        alive = [p for p in there if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return [" ".join(p.cmdline()) for p in alive]

    return left


def detection(run: Path, at: float) -> tuple[str, float]:
    """The one fault of a run, and how long after the cut it was seen."""
    (stop,) = [event for event in rows(run, "events.jsonl") if event["first_fault"]]
    seconds = stop["seen"] - at
    print(f"seen {seconds:.1f} s after the cut: {stop['first_fault']}")
    return stop["first_fault"], seconds


def patience(run: Path) -> float:
    """Seconds of silence that are taken for a fault, as promised."""
    return max(CPU.silence, 3 * max(row["step_seconds"] for row in rows(run) if row["attempt"] == 1))


def same_bits(run: Path, quiet: Path) -> bool:
    """Whether every step, and the state at the end, is the quiet run's."""
    return curve(run) == curve(quiet) and weights(run, STEPS) == weights(quiet, STEPS)


def assert_same_run(run: Path, quiet: Path) -> None:
    """The same samples at every step, and the losses of another layout."""
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(quiet)]
    assert [row[1] for row in curve(run)] == pytest.approx([row[1] for row in curve(quiet)], rel=5e-7)


def attempts_of_commits(run: Path) -> dict[int, int]:
    """Which attempt made the commits that there are, by step."""
    store = Store(str(run / "checkpoints"))
    return {step: store.manifest(step).meta["attempt"] for step in store.steps()}


def troubles(run: Path) -> list[str]:
    """What was told of saves that failed."""
    return [event["reason"] for event in rows(run, "events.jsonl") if "save" in event["reason"]]


def test_what_is_left_goes_on_narrower(quiet: Path, tmp_path: Path) -> None:
    """The node of rank 0, where the ranks met, is lost, and there is no other in its place."""
    with network(0, 1, 1) as net, under_way(net, quiet, tmp_path) as (run, driver):
        at = net.cut(node_of(net, run, 0))
        assert driver.wait(timeout=120) == 0
        assert detection(run, at)[1] <= patience(run) + LATE
    assert rows(run)[-1]["layout"] == "dp1 zero0 mb8"
    assert_same_run(run, quiet)


def test_the_head_is_cut_off_from_all_for_a_while(quiet: Path, tmp_path: Path) -> None:
    """The controller is there, and nobody it could start again with, until the network is mended: then with who
    answers first."""
    with network(0, 1, 1) as net, under_way(net, quiet, tmp_path) as (run, driver):
        at = net.cut(0)
        wait_for(lambda: status(run)["phase"] == "wait", "the controller to see that it is alone")
        assert detection(run, at)[1] <= patience(run) + LATE
        net.heal(0)
        assert driver.wait(timeout=120) == 0
    assert rows(run, "events.jsonl")[-1]["attempt"] == 2
    assert_same_run(run, quiet)


def test_the_driver_is_cut_off_for_a_while(quiet: Path, tmp_path: Path) -> None:
    """Nobody but it notices."""
    with network(0, 1, 1, 0) as net, under_way(net, quiet, tmp_path, driver=3) as (run, driver):
        at = net.cut(3)
        wait_for(lambda: rows(run)[-1]["time"] > at + 5.0, "five seconds of steps")
        net.heal(3)
        assert driver.wait(timeout=120) == 0
    assert rows(run, "events.jsonl")[-1]["attempt"] == 1
    assert same_bits(run, quiet)


def test_a_node_that_is_cut_off_is_replaced(quiet: Path, tmp_path: Path) -> None:
    with network(0, 1, 1, 1) as net, under_way(net, quiet, tmp_path) as (run, driver):
        at = net.cut(node_of(net, run, 1))
        assert driver.wait(timeout=120) == 0
        fault, seconds = detection(run, at)
        assert fault.startswith("rank 1 on")
        assert seconds <= patience(run) + LATE
    assert same_bits(run, quiet)
    assert set(attempts_of_commits(run).values()) == {2}
    assert troubles(run) == []


def test_what_comes_back_disturbs_nothing(quiet: Path, tmp_path: Path) -> None:
    """The network is mended while the next attempt runs."""
    with network(0, 1, 1, 1) as net, under_way(net, quiet, tmp_path) as (run, driver):
        node = node_of(net, run, 1)
        old = next(r["pid"] for r in status(run)["ranks"] if r["rank"] == 1)
        at = net.cut(node)
        wait_for(lambda: rows(run)[-1]["attempt"] == 2, "the next attempt")
        assert detection(run, at)[1] <= patience(run) + LATE
        assert psutil.pid_exists(old)
        net.heal(node)
        wait_for(lambda: not psutil.pid_exists(old), "the rank that is not wanted any more to end", 10)
        assert driver.wait(timeout=120) == 0
    assert rows(run, "events.jsonl")[-1]["attempt"] == 2
    assert same_bits(run, quiet)
    assert troubles(run) == []


def test_a_rank_that_trains_on_behind_the_cut_commits_nothing(quiet: Path, tmp_path: Path) -> None:
    """Alone it waits for nobody: it goes on with the steps, and reaches the storage."""
    alone = {"workers": {"min": 1, "max": 1}}
    with network(0, 1, 1) as net, under_way(net, quiet, tmp_path, **alone) as (run, driver):
        old, node = status(run)["ranks"][0]["pid"], node_of(net, run, 0)
        left = ours(net, node)
        at = net.cut(node)
        wait_for(lambda: status(run)["attempt"] == 2, "the next attempt")
        assert detection(run, at)[1] <= patience(run) + LATE
        assert psutil.pid_exists(old)
        assert driver.wait(timeout=120) == 0
        wait_for(lambda: not left(), "what is cut off to end by itself", ENDED)
    assert set(attempts_of_commits(run).values()) == {2}
    assert troubles(run) == []
    assert [row[3] for row in curve(run)] == [row[3] for row in curve(quiet)]


def test_a_node_that_hears_nothing_is_replaced_though_it_is_heard(quiet: Path, tmp_path: Path) -> None:
    with network(0, 1, 1, 1) as net, under_way(net, quiet, tmp_path) as (run, driver):
        at = net.deafen(node_of(net, run, 1))
        assert driver.wait(timeout=120) == 0
        assert detection(run, at)[1] <= patience(run) + LATE
    assert same_bits(run, quiet)
    assert troubles(run) == []

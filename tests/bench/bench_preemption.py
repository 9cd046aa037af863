"""Ray's own preemption benchmark (ray#65047), scaled to one machine: steps that are wasted by four preemptions.

    python tests/bench/bench_preemption.py --kinds notice kill --peers ours jit periodic torchft

Theirs: 8 GPUs, ViT-B/16, 1,600 steps of 1.1 s, a checkpoint every 400, 4 preemptions; 517 steps wasted with periodic
checkpoints, 91 with just-in-time ones. Here: 8 nodes of one processor as processes of one machine, a rank each of one
thread, a tiny model with a pause in each step in place of a device's work, fewer steps (--steps) and a checkpoint every
quarter of them. The preemptions come when the same shares of the steps are done as there: 0.43, 0.54, 0.87, 0.97.

notice  the node is drained in Ray, with --seconds of notice, and then all its processes are killed
kill    all its processes are killed, without notice

Other nodes are there already in both, and the next preemption waits for three new steps. Wasted are the steps that were
done beyond those of the job: of Ray Train as rank 0 counts them, of ours those that a rank had done when it was stopped
and that are done again. With torchft, which has to be installed (torchft==0.2.0), they are the steps that a replica did
and the others did not agree on; the replicas that are left go on with smaller batches, and the last column has the
replicas in the order in which they started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paths  # noqa: F401

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import ray
from jobs import command, job, kill_tree, rows, status, write_job, write_text

from cluster.workers import nodes as ray_nodes

AT = (0.43, 0.54, 0.87, 0.97)
"""Shares of the steps that are done at each preemption."""
NAMES = {
    "ours": "orchestrator",
    "periodic": "Ray Train V2, periodic checkpoints",
    "jit": "Ray Train V2, just-in-time checkpoints",
    "torchft": "Ray Train V2, TorchftConfig",
}
CASE_TIMEOUT = 1200.0


class Machines:
    """A Ray cluster of a head and one-processor nodes, each with an address of its own.

    The head has no processor but for TorchftConfig, whose lighthouse needs one beside Ray Train's controller.
    """

    def __init__(self, workers: int, head_processors: int = 0) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._number = 0
        self._head_processors = head_processors
        for _ in range(workers + 1 + len(AT)):  # another node is there before one is taken away
            self.add()
        self.cluster.wait_for_nodes(timeout=120)

    def add(self) -> None:
        """Add a node; the first is the head."""
        health = {
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 5000,
            "health_check_failure_threshold": 3,
        }
        self.cluster.add_node(
            num_cpus=1 if self._number else self._head_processors,
            node_ip_address=f"127.0.0.{60 + self._number}",
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            dashboard_agent_listen_port=0,
            **({"_system_config": health} if not self._number else {}),
        )
        self._number += 1

    def kill(self, node: Any, ranks: list[int]) -> None:
        """Kill all processes of a node at once, its ranks and the processes that write their snapshots among them.

        On one machine all nodes share the process that has the imports of our ranks, which so are not below the raylet
        of their node. It is spared with what is below it, but for this node's ranks and their parents.
        """
        family = [process for process in family_of(node) if not is_shared(process)]
        for pid in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid).parent()
                assert parent is not None
                family += [parent, *parent.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End everything that the nodes started."""
        family = [process for node in self.cluster.list_all_nodes() for process in family_of(node)]
        for node in [*self.cluster.worker_nodes, self.cluster.head_node]:
            self.cluster.remove_node(node, allow_graceful=False)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def family_of(node: Any) -> list[psutil.Process]:
    """The processes that a node's raylet has started, and theirs."""
    try:
        return psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    except (psutil.NoSuchProcess, KeyError):
        return []


def is_shared(process: psutil.Process) -> bool:
    """Whether a process of our ranks is below one that several nodes share."""
    with contextlib.suppress(psutil.Error):
        return any("shared_imports" in " ".join(each.cmdline()) for each in [process, *process.parents()])
    return False


@dataclass
class Result:
    """What a run cost."""

    seconds: float
    wasted: int
    resumed: list[int]
    attempts: int


class Run:
    """A run of one peer, under way."""

    def __init__(self, peer: str, folder: Path, machines: Machines, options: argparse.Namespace) -> None:
        self.folder, self._peer, self._options = folder, peer, options
        interval = options.steps // 4
        if peer == "ours":
            document = job(str(folder.parent / "corpus" / "topics.txt"), steps=options.steps)
            document["data"]["cache"] = str(folder.parent / "cache")
            document["resources"] = {"workers": {"min": options.workers, "max": options.workers}}
            document["checkpoint"] = {"every": interval, "keep": 3, "export": None}
            document["limits"] = {"restarts": 100}
            path = write_job(folder, document)
            words = command("run", path, "--run-dir", folder / "run", "--address", machines.cluster.address)
            for attempt in range(1, 30):
                words += ["--fault", f"slow@0:1/{attempt}={options.pause}"]
        else:
            here = Path(__file__).parent
            words = [sys.executable, str(here / "preemption_train.py"), machines.cluster.address, str(folder)]
            words += [str(options.workers), str(options.steps), str(interval), str(options.pause), peer]
        self._log = open(folder / "log.txt", "w")  # noqa: SIM115
        env = os.environ | {"RAY_TRAIN_V2_ENABLED": "1"}
        self.process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=self._log, stderr=self._log, text=True
        )

    def step(self) -> int:
        """The last step that was done."""
        if self._peer == "ours":
            with contextlib.suppress(FileNotFoundError, IndexError):
                return int(json.loads(_lines(self.folder / "run/metrics.jsonl")[-1])["step"])
            return 0
        return max((int(_lines(path)[-1].split()[0]) for path in self.folder.glob("steps*.txt")), default=0)

    def ranks(self) -> dict[str, list[int]]:
        """The processes of our ranks by the address of their node; empty for Ray Train."""
        found: dict[str, list[int]] = {}
        for rank in status(self.folder / "run").get("ranks", ()) if self._peer == "ours" else ():
            found.setdefault(rank["node"], []).append(int(rank["pid"]))
        return found

    def controller(self) -> int:
        """The process of our controller; 0 for Ray Train's."""
        return int(status(self.folder / "run").get("pid", 0)) if self._peer == "ours" else 0

    def wait(self, step: int) -> None:
        """Wait until a step is done."""
        end = time.monotonic() + CASE_TIMEOUT
        while self.step() < step:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"{self._peer} did not reach step {step}: {self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """The end of what it printed."""
        return (self.folder / "log.txt").read_text()[-1500:]

    def result(self, began: float) -> Result:
        """Wait for the end."""
        if self.process.wait(CASE_TIMEOUT):
            raise RuntimeError(f"{self._peer} failed: {self.tail()}")
        seconds = time.monotonic() - began
        if self._peer == "ours":
            events = rows(self.folder / "run", "events.jsonl")
            starts = [event["step"] for event in events if event["phase"] == "start"]
            ends = [event["step"] for event in events if event["phase"] == "stop"]
            wasted = sum(max(end - start, 0) for end, start in zip(ends, starts[1:], strict=False))
            return Result(seconds, wasted, starts, len(starts))
        if self._peer == "torchft":
            wasted = max((len(_lines(path)) for path in self.folder.glob("failed-*.txt")), default=0)
            starts = [int(line) for line in _lines(self.folder / "resumed.txt")]
            return Result(seconds, wasted, starts, len(starts))
        done = len(_lines(self.folder / "steps.txt"))
        resumed = [int(line) for line in _lines(self.folder / "resumed.txt")]
        return Result(seconds, done - self._options.steps, resumed, len(resumed))

    def close(self) -> None:
        """End what is left of it."""
        kill_tree(self.process.pid)
        self.process.wait()
        self._log.close()


def _lines(path: Path) -> list[str]:
    """The lines of a file; the last one may still be written, and is left out then."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().split("\n")[:-1]
    return []


def measured(peer: str, kind: str, root: Path, options: argparse.Namespace) -> Result:
    """One run with four preemptions."""
    folder = root / f"{peer}-{kind}-{time.time_ns()}"
    folder.mkdir()
    draw = random.Random(f"{options.seed}-{kind}")
    machines = Machines(options.workers, head_processors=int(peer == "torchft"))
    ray.init(address=machines.cluster.address, log_to_driver=False)
    began = time.monotonic()
    run = Run(peer, folder, machines, options)
    try:
        last = 0
        for share in AT:
            run.wait(min(max(int(share * options.steps), last + 3), options.steps - 1))
            # The controller may be on any node; the loss of its node is another matter.
            busy: list[Any] = []
            while not busy and run.process.poll() is None:  # between two attempts there are no ranks
                time.sleep(0.05)
                ranks = run.ranks()
                busy = [node for node in machines.cluster.worker_nodes if has_rank(node, ranks)]
            if not busy:
                break  # the run ended within the last notice
            node = draw.choice([each for each in busy if not has_controller(each, run.controller())] or busy)
            if kind == "notice":
                node_id = next(each.id for each in ray_nodes.alive() if each.address == node.node_ip_address)
                ray_nodes.drain(node_id, options.seconds, "preempted")
                time.sleep(options.seconds)
            machines.kill(node, run.ranks().get(node.node_ip_address, []))
            last = run.step()
        return run.result(began)
    finally:
        run.close()
        ray.shutdown()
        machines.close()
        shutil.rmtree(folder, ignore_errors=True)


def has_rank(node: Any, ranks: dict[str, list[int]]) -> bool:
    """Whether one of our ranks, or a worker of Ray Train, runs on the node."""
    return node.node_ip_address in ranks or any(_is(process, "RayTrainWorker") for process in family_of(node))


def has_controller(node: Any, pid: int) -> bool:
    """Whether the run's controller, or Ray Train's, runs on the node."""
    return any(process.pid == pid or _is(process, "Controller") for process in family_of(node))


def _is(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return name in " ".join(process.cmdline()) and "ray::" in process.cmdline()[0]
    return False


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=["ours", "jit", "periodic"])
    parser.add_argument("--kinds", nargs="+", choices=("notice", "kill"), default=["notice", "kill"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds of each step in place of a device's work"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of notice")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| | preemptions | wasted steps | seconds | attempts resumed from |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_text(root / "corpus")
        for _ in range(options.rounds):
            for kind in options.kinds:
                for peer in options.peers:
                    try:
                        found = measured(peer, kind, root, options)
                    except RuntimeError as error:
                        print(f"| {NAMES[peer]} | {kind} | failed | | |\n{error}", flush=True)
                        continue
                    resumed = json.dumps(found.resumed)
                    print(
                        f"| {NAMES[peer]} | {kind} | {found.wasted} | {found.seconds:.0f} | {resumed} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

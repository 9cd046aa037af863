"""Recovery, side by side: ours, Ray Train V2 with its defaults and tuned, and torchrun, on one machine in one run.

All train the same tiny GPT with the same rank program, layout, data and commits, two ranks of one thread each
(--workers). On Ray each case has a cluster of its own: a head and three nodes of one processor, so that a lost node can
be replaced.

    python tests/bench/bench_recovery.py                          kill, stop, node, cost
    python tests/bench/bench_recovery.py --cases goodput --mtbf 60 15 --seconds 300

kill    SIGKILL of the last rank as it begins a step, to the next new step finished
stop    SIGSTOP of the last rank, likewise; given up after --bound seconds
node    SIGKILL of the raylet under a rank, likewise
cost    a step without any fault, over that of torchrun; also torchrun's while Ray's own processes idle beside it,
        which here share the processors with the ranks
goodput steps done while a random rank is killed after random times, of those done by torchrun undisturbed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paths  # noqa: F401

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
os.environ["OMP_NUM_THREADS"] = "1"

import psutil
from jobs import command, job, kill_tree, status, write_job, write_text

from orchestrator.storage.row_line import decode

TUNED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}
NAMES = {
    "ours": "orchestrator",
    "train": "Ray Train V2, defaults",
    "tuned": "Ray Train V2, shorter timeouts",
    "torchrun": "torchrun --max-restarts",
    "beside": "torchrun, beside an idle Ray cluster",
}
FAULT_STEP, WARM_UP = 26, 10
CASE_TIMEOUT = 150.0
RANK = re.compile(r"ray::(\w*WorkerHost|\w*RayTrainWorker)")
REPORT_EVERY = 50


@dataclass
class Bench:
    """Where things are, and how the cases are run."""

    folder: Path
    options: argparse.Namespace
    number: int = 0

    def write_job(self, steps: int, snapshots: bool) -> Path:
        """The job of every peer; ours keeps snapshots in memory besides, as often as the job leaves open or asks."""
        document = job(str(self.folder / "corpus" / "topics.txt"), steps=steps)
        document["workload"] = {"model": "gpt-tiny"}
        document["data"] |= {"sequence_length": 128, "cache": str(self.folder / "data")}
        document["resources"] = {"workers": {"min": 1, "max": self.options.workers}}
        if self.options.spares:
            document["resources"]["spares"] = self.options.spares
        asked = self.options.snapshot_every
        every = {"snapshot_every": asked} if snapshots and asked else {}
        document["checkpoint"] = {"every": self.options.every, "keep": 3, "export": None, **every}
        return write_job(self.folder, document, f"job-{self.number}.yaml")

    def prepare(self) -> None:
        """Token shards and a layout, for all."""
        write_text(self.folder / "corpus", 400_000)
        words = command("run", self.write_job(12, False), "--run-dir", self.folder / "first", "--until", 1)
        subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
        assert (self.folder / "first" / "plan.json").exists(), "the first run failed"

    def task(self, path: Path, run: Path, faults: tuple[str, ...]) -> Path:
        """What torchrun's ranks are told."""
        from orchestrator.config.paths import resolve_paths
        from orchestrator.config.spec import load
        from orchestrator.train.task import Task

        spec = resolve_paths(load(path), self.folder)
        layout = json.loads((self.folder / "first" / "plan.json").read_text())["chosen"]
        layout.pop("text")
        data = next((self.folder / "data").iterdir())
        task = Task(
            spec.model_dump(mode="json"),
            layout,
            str(run),
            str(data),
            1,
            None,
            spec.train.steps,
            faults=faults,
        )
        run.mkdir()
        found = self.folder / f"task-{self.number}.json"
        found.write_text(json.dumps(task.to_json()))
        return found


@dataclass
class Case:
    """One run of one peer, under way: its rows as they appear, whatever is rolled back later."""

    run: Path
    process: subprocess.Popen[str]
    cluster: OwnCluster | None = None
    seen: dict[tuple[int, int], float] = field(default_factory=dict)
    running: bool = True

    def follow(self) -> None:
        """Collect the rows until the case ends."""
        inode, offset = 0, 0
        while self.running:
            with contextlib.suppress(FileNotFoundError):
                with open(self.run / "metrics.jsonl", "rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != inode or found.st_size < offset:  # replaced or cut by a roll-back
                        inode, offset = found.st_ino, 0
                    file.seek(offset)
                    text, end, _ = file.read().rpartition(b"\n")
                offset += len(text + end)
                for row in filter(None, map(decode, filter(None, text.splitlines()))):
                    self.seen.setdefault((row["attempt"], row["step"]), row["time"])
            time.sleep(0.05)

    def wait(self, found: Callable[[], Any], seconds: float) -> Any:
        """The first true value, or None if the time is over or the peer has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := found():
                return value
            if self.process.poll() is not None:
                time.sleep(0.2)
                return found()
            time.sleep(0.05)
        return None

    def steps(self) -> int:
        """The last step that any attempt has done."""
        return max((step for _, step in list(self.seen)), default=0)

    def ranks(self) -> list[psutil.Process]:
        """The processes that train."""
        if self.cluster is None:
            found = _children(self.process.pid)
            return [p for p in found if any(word.endswith("recovery_rank.py") for word in _words(p)[:3])]
        if told := status(self.run).get("ranks"):
            return [psutil.Process(rank["pid"]) for rank in told if psutil.pid_exists(rank["pid"])]
        family = [p for node in self.cluster.nodes for p in _children(node.raylet)]
        return [p for p in family if RANK.match(" ".join(_words(p)))]


class OwnCluster:
    """A cluster of its own; nothing of it is left afterwards, not even what SIGSTOP froze."""

    def __init__(self, health_ms: int) -> None:
        from ray.cluster_utils import Cluster

        health = {
            "health_check_period_ms": health_ms,
            "health_check_timeout_ms": 2 * health_ms,
            "health_check_failure_threshold": 3,
        }
        self.cluster = Cluster()
        for number in range(4):
            self.cluster.add_node(
                num_cpus=min(number, 1),
                node_ip_address=f"127.0.0.{30 + number}",
                object_store_memory=100 * 2**20,
                include_dashboard=False,
                **({"_system_config": health} if number == 0 and health_ms else {}),
            )
        self.cluster.wait_for_nodes(timeout=60)
        self.nodes = [
            Node(node, node.all_processes["raylet"][0].process.pid) for node in self.cluster.list_all_nodes()
        ]
        self.head = self.nodes[0]

    def close(self) -> None:
        """End everything that the nodes started."""
        family = [p for node in self.nodes for p in _children(node.raylet)]
        for node in [*self.cluster.worker_nodes, self.cluster.head_node]:
            self.cluster.remove_node(node, allow_graceful=False)  # a graceful end is waited for half a minute
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class Node:
    """A node and the process of its raylet."""

    node: Any
    raylet: int


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def started(bench: Bench, peer: str, steps: int, faults: tuple[str, ...] = ()) -> Iterator[Case]:
    """A peer at work on a fresh run."""
    bench.number += 1
    run = bench.folder / f"run-{bench.number}"
    path = bench.write_job(steps, peer == "ours")
    own = None if peer == "torchrun" else OwnCluster(bench.options.health_ms)
    env = os.environ | (TUNED if peer == "tuned" else {})
    here = Path(__file__).parent
    if peer == "ours":
        words = [*command("run", path, "--run-dir", run, "--address", own.cluster.address)]
        words += [word for fault in faults for word in ("--fault", fault)]
    elif peer in ("torchrun", "beside"):
        words = [sys.executable, "-m", "torch.distributed.run"]
        words += ["--nproc-per-node", str(bench.options.workers)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(29_600 + bench.number)]
        words += [
            "--max-restarts",
            "1000",
            str(here / "recovery_rank.py"),
            str(bench.task(path, run, faults)),
        ]
    else:
        words = [sys.executable, str(here / "recovery_train.py"), own.cluster.address, str(path), str(run)]
        words += [str(REPORT_EVERY), *faults]
    log = open(bench.folder / f"log-{bench.number}.txt", "w")  # noqa: SIM115
    process = subprocess.Popen(words, cwd=bench.folder, env=env, stdout=log, stderr=log, text=True)
    case = Case(run, process, own)
    thread = threading.Thread(target=case.follow, daemon=True)
    thread.start()
    try:
        yield case
    finally:
        case.running = False
        thread.join()
        for rank in case.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        kill_tree(process.pid)
        process.wait()
        log.close()
        if own is not None:
            own.close()
        shutil.rmtree(run, ignore_errors=True)


@dataclass(frozen=True)
class Recovery:
    """Seconds from the fault to the next new step, None if it did not come in time; steps done again."""

    seconds: float | None
    lost: int | None


def recovery(bench: Bench, peer: str, kind: str) -> Recovery:
    """One fault."""
    faults = () if kind == "node" else (f"{kind}@{bench.options.workers - 1}:{FAULT_STEP}",)
    bound = bench.options.bound if kind == "stop" else CASE_TIMEOUT
    with started(bench, peer, FAULT_STEP + 30, faults) as case:
        if not case.wait(lambda: case.steps() >= FAULT_STEP - 1, CASE_TIMEOUT):
            raise RuntimeError(f"{peer} made no {FAULT_STEP - 1} steps: see {_log_tail(bench)}")
        if kind == "node":
            at = _kill_a_node(case)
            last = max(step for (_, step), when in case.seen.items() if when <= at)
        else:
            at, last = _struck(case), FAULT_STEP - 1

        def resumed() -> float:
            # A node takes its last rows along, so the first new step may be later than the one after the last row.
            later = [when for (a, step), when in list(case.seen.items()) if a > 1 and step > last]
            return min(later, default=0.0)

        when = case.wait(resumed, bound)
        if not when and case.process.poll() is not None:
            print(f"{peer} ended with {case.process.poll()}: {_log_tail(bench)}", file=sys.stderr)
        again = [step for a, step in case.seen if a > 1]
        return Recovery(when - at if when else None, max(last + 1 - min(again), 0) if again else None)


def _struck(case: Case) -> float:
    """When the fault of the first attempt struck: at the end of the step before, whose row may be lost with it."""
    before = {step: when for (attempt, step), when in list(case.seen.items()) if attempt == 1}
    last = max(before)
    pace = (before[last] - before[last - WARM_UP]) / WARM_UP
    return before[last] + (FAULT_STEP - 1 - last) * pace


def _kill_a_node(case: Case) -> float:
    """SIGKILL the raylet of a node that has a rank, and neither the head nor the controller, if there is one."""
    with_rank = {above.pid for rank in case.ranks() for above in rank.parents()}
    spared = {case.cluster.head.raylet}
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        spared |= {above.pid for above in psutil.Process(status(case.run)["pid"]).parents()}
    victims = [node for node in case.cluster.nodes if node.raylet in with_rank - spared]
    family = _children(victims[0].raylet)
    at = time.time()
    for process in family:  # a lost machine takes its processes along at once
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    case.cluster.cluster.remove_node(victims[0].node, allow_graceful=False)
    return at


def step_seconds(bench: Bench, peer: str) -> float:
    """Seconds a step without faults, commits included."""
    with started(bench, peer, bench.options.steps) as case:
        done = case.wait(lambda: case.steps() >= bench.options.steps, CASE_TIMEOUT)
        if not done:
            raise RuntimeError(f"{peer} did not end: see {_log_tail(bench)}")
        times = sorted(case.seen.values())[WARM_UP:]
        return (times[-1] - times[0]) / (len(times) - 1)


def useful_steps(bench: Bench, peer: str, mtbf: float) -> int:
    """Steps done in the given time from the first on, while random ranks die at random times: the same for all."""
    rng = random.Random(f"{bench.options.seed}-{mtbf}")
    with started(bench, peer, 1_000_000) as case:
        if not case.wait(lambda: case.steps() >= 1, CASE_TIMEOUT):
            raise RuntimeError(f"{peer} made no step: see {_log_tail(bench)}")
        began = time.monotonic()
        due = began + rng.expovariate(1 / mtbf)
        while (now := time.monotonic()) < began + bench.options.seconds:
            ranks = case.ranks() if now >= due else []
            if ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ranks[rng.randrange(len(ranks))].kill()
            if now >= due:
                due += rng.expovariate(1 / mtbf)
            time.sleep(0.05)
        case.running = False
        last = max(a for a, _ in case.seen)
        return max(step for a, step in case.seen if a == last)


def _log_tail(bench: Bench) -> str:
    return (bench.folder / f"log-{bench.number}.txt").read_text()[-2000:]


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    cases = ("kill", "stop", "node", "cost", "goodput")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases[:4]))
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, default=2, help="ranks; 1 leaves a processor to everything else"
    )
    parser.add_argument("--steps", type=int, default=60, help="of a run without faults")
    parser.add_argument("--every", type=int, default=10, help="steps between commits")
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=None,
        help="ours: steps between snapshots in memory [default: auto]",
    )
    parser.add_argument("--spares", type=int, default=0, help="ours: idle workers that are kept ready")
    parser.add_argument("--bound", type=float, default=40.0, help="seconds that a stopped rank is waited for")
    parser.add_argument(
        "--health-ms", type=int, default=0, help="Ray's health check period; 0 is its default"
    )
    parser.add_argument("--mtbf", type=float, nargs="+", default=[15.0], help="seconds between failures")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a trace of failures")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options)
        bench.prepare()
        found = _measure(bench)
    _print(options, found)


def _measure(bench: Bench) -> dict[tuple[str, str], list[Any]]:
    """Every case of every peer, peers in turn."""
    found: dict[tuple[str, str], list[Any]] = {}

    def measured(case: str, peer: str, call: Callable[[], Any]) -> None:
        found.setdefault((case, peer), []).append(call())
        print(f"{case} {peer}: {found[case, peer][-1]}", file=sys.stderr, flush=True)

    for _ in range(bench.options.rounds):
        for case in bench.options.cases:
            for peer in bench.options.peers:
                if peer == "beside" and case != "cost":
                    continue
                if case == "cost" or (case == "goodput" and peer == "torchrun"):
                    measured("cost", peer, lambda p=peer: step_seconds(bench, p))
                if case in ("kill", "stop") or (case == "node" and peer != "torchrun"):
                    measured(case, peer, lambda c=case, p=peer: recovery(bench, p, c))
                for mtbf in bench.options.mtbf if case == "goodput" else ():
                    measured(f"goodput {mtbf:g}", peer, lambda p=peer, m=mtbf: useful_steps(bench, p, m))
    return found


def _print(options: argparse.Namespace, found: dict[tuple[str, str], list[Any]]) -> None:
    """Medians over the rounds."""
    oracle = statistics.median(found["cost", "torchrun"]) if ("cost", "torchrun") in found else None
    columns = [c for c in ("kill", "stop", "node") if c in options.cases]
    columns += ["cost"] if oracle and "cost" in options.cases else []
    columns += [f"goodput {mtbf:g}" for mtbf in options.mtbf if "goodput" in options.cases]
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for peer in options.peers:
        cells = [_cell(column, found.get((column, peer), []), oracle, options) for column in columns]
        print(f"| {NAMES[peer]} | " + " | ".join(cells) + " |")


def _cell(column: str, values: list[Any], oracle: float | None, options: argparse.Namespace) -> str:
    if not values:
        return "-"
    if column == "cost":
        return f"{statistics.median(values) / oracle:.3f} ({statistics.median(values) * 1e3:.0f} ms)"
    if column.startswith("goodput"):
        return f"{statistics.median(values) * oracle / options.seconds:.2f}" if oracle else f"{values} steps"
    seconds = [value.seconds for value in values]
    lost = max((value.lost or 0) for value in values)
    if None in seconds:
        return f"> {options.bound if column == 'stop' else CASE_TIMEOUT:g} s"
    return f"{statistics.median(seconds):.1f} s, {lost} lost"


if __name__ == "__main__":
    main()

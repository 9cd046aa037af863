"""A week on spot machines in an hour: what changes of the nodes and kills cost a run, and whether anything leaks.

    python tests/bench/soak_week.py FOLDER                            # 336 changes and 164 kills: 500 attempts
    python tests/bench/soak_week.py FOLDER --changes 48 --kills 24    # a day

Four nodes come and go, without Ray: a node is its ranks, the processes that write their snapshots and its snapshot
server. The trace has the published statistics of spot machines: 3.26 of 4 nodes are up on average, and a change comes
every half hour. Every other loss comes with notice. Between the changes random ranks are killed. The run evaluates,
exports every checkpoint and reports to MLflow.

The script runs only the seconds of each half hour in which something happens: from the change until the run uses the
nodes that are up, and the next steps. A sample sleeps in place of a device's work, so that steps on fewer nodes take
longer and processors are free. The oracle uses every node at once and loses nothing; its step is the median step on so
many nodes. The cost of a change is the number of steps that the oracle does meanwhile and the run does not. The week
has every cost once, and otherwise the undisturbed steps with their evaluations and checkpoints. To be quicker, the run
grows once there is room for --roomy seconds; the week is charged with the seconds of a real run.

FOLDER/week.json has what was measured, FOLDER/week.png what the lasting processes held after each attempt. Ends with
exit code 1 if the goodput is below that asked for, or if something grows by more than its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import psutil
from simulated_nodes import Nodes, NodesGang, controller_on

from cluster.workers.shared_imports import CallInCopy, SharedImports
from orchestrator.controller import decide
from orchestrator.train.task import ENTRY

NODES = 4
DOWN = 0.1747
"""Probability that a change takes a node if 2 or 3 are up, by which 3.26 are up on average. The last one stays."""
HALF_HOUR = 1800.0
STEADY = 20
"""Steps after the run has adapted to a change."""
PATIENCE = 600.0
"""Seconds to adapt."""
NOTICE = 2.0
"""Seconds from a notice to the end of the node, at most."""
SECONDS, BATCH = 0.01, 24
"""Seconds that a sample sleeps, and samples of a step."""
GOODPUT = 0.97
GROWS = {"metrics.jsonl", "mlflow.db", "mlflow.db-journal", "checkpoints", "export", "cache"}
"""Files and folders that grow with the steps, or whose size changes with each checkpoint."""
LASTING = {"cluster.workers.fork_server", "cluster.workers.shared_imports"}
"""The modules of the processes that last from attempt to attempt, besides this one."""
BOUNDS = {"processes": 0.02, "threads": 0.02, "files": 0.02, "memory": 40e3, "disk": 40e3}
"""The most that an attempt may add; memory and disk in bytes."""


def job(folder: Path) -> dict[str, Any]:
    """The job, whose step takes 0.06 s on four nodes."""
    cost = {"use": "paced_model:seconds_of", "options": {"seconds": SECONDS, "batch": BATCH}}
    return {
        "name": "week",
        "seed": 1,
        "workload": {"model": "paced_model:Paced", "changes": {"seconds": SECONDS}},
        "data": {"samples": "paced_model:Points", "validation": {"share": 0.1}},
        "train": {
            "steps": 10_000_000,
            "global_batch": BATCH,
            "optimizer": {"lr": 1e-3, "schedule": "constant"},
        },
        "parallel": {"zero": 1, "micro_batch": 2, "cost": cost},
        "resources": {"workers": {"min": 1, "max": NODES}},
        "evaluate": {"every": 200, "batches": 1},
        "checkpoint": {
            "every": 100,
            "keep": 3,
            "snapshot_every": 1,
            "export": "safetensors",
            "export_at": "commit",
        },
        "limits": {"restarts": 1_000_000},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "week"},
    }


class WeekGang(NodesGang):
    """Keeps the last row and the times of steps alone, since what it keeps of every step would look like a leak.

    Attributes:
        last: step and time of the last row.
        paces: the seconds from row to row, by the number of nodes, while `is_steady`.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self.last = (0, time.time())
        self.is_steady = False
        self.paces: dict[int, list[float]] = defaultdict(list)

    def start(self, *arguments: Any, **more: Any) -> None:
        """See `Gang.start`."""
        self.is_steady = False
        super().start(*arguments, **more)

    def take(self, rows: tuple[dict[str, Any], ...]) -> None:
        """See `NodesGang.take`."""
        for row in rows:
            if self.is_steady:
                self.paces[len(self.places)].append(row["time"] - self.last[1])
            self.last = row["step"], row["time"]
            self.since_start += 1


@dataclasses.dataclass
class Change:
    """A change of the nodes, or a kill, and what followed."""

    kind: str
    """lost, noticed, added or killed."""
    before: int
    """Nodes that were up."""
    after: int
    held: float = 0.0
    """Seconds for which the node of a notice was still there."""
    seconds: float = 0.0
    """From the last row before it to the last row of the steps that followed."""
    steps: int = 0
    """Finished in these seconds."""
    adapted: float = 0.0
    """Seconds until the first row on the nodes that are up."""
    attempt: int = 0
    held_by_processes: dict[str, float] = dataclasses.field(default_factory=dict)

    def missed(self, pace: dict[int, float], waited_less: float = 0.0) -> float:
        """The steps that the oracle does in the same time and the run does not.

        Args:
            pace: seconds of a step by the number of nodes.
            waited_less: seconds that a real run would wait longer before it grows.
        """
        oracle = self.held / pace[self.before] + (self.seconds - self.held) / pace[self.after]
        longer = waited_less * (1 / pace[self.after] - 1 / pace[self.before]) if self.kind == "added" else 0.0
        return oracle - self.steps + longer


class Weather(threading.Thread):
    """Takes and adds nodes and kills ranks, and each time waits until the run has adapted."""

    def __init__(self, gang: WeekGang, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self._gang, self._nodes, self._folder = gang, gang.nodes, folder
        self._options, self._random = options, random.Random(options.seed)
        self.changes: list[Change] = []
        self.error = ""
        self.stop = lambda: None

    def run(self) -> None:
        """All of it, and then the end of the run."""
        try:
            self._until(lambda: self._gang.since_start >= STEADY)
            end = time.monotonic() + self._options.seconds
            while (
                time.monotonic() < end
                and (number := sum(change.kind != "killed" for change in self.changes))
                < self._options.changes
            ):
                kills = len(self.changes) - number
                self._change(
                    "killed" if kills * self._options.changes < number * self._options.kills else self._next()
                )
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.stop()

    def _next(self) -> str:
        up = len(self._nodes.names)
        if up == 1 or (up < NODES and self._random.random() > DOWN):
            return "added"
        losses = sum(change.kind in ("lost", "noticed") for change in self.changes)
        return "noticed" if losses % 2 else "lost"

    def _change(self, kind: str) -> None:
        gang, names = self._gang, self._nodes.names
        attempts, (step, at), before = len(gang.restored), gang.last, len(names)
        held = 0.0
        if kind == "added":
            names.append(next(name for n in range(NODES) if (name := f"node-{n}") not in names))
        elif kind == "killed":
            gang.kill_rank(self._random.randrange(len(gang.pids)))
        else:
            name = names.pop(self._random.randrange(before))
            if kind == "noticed":
                gang.notify(name)
                end = time.time() + NOTICE
                while len(gang.restored) == attempts and time.time() < end:
                    time.sleep(0.01)
                held = time.time() - at
            gang.kill_node(name)
        change = Change(kind, before, len(names), held)
        self._until(
            lambda: len(gang.restored) > attempts and set(gang.places) == set(names) and gang.since_start > 0
        )
        change.adapted = time.time() - at
        self._until(lambda: gang.since_start >= 3)
        gang.is_steady = True
        self._until(lambda: gang.since_start >= 3 + STEADY)
        gang.is_steady = False
        change.steps, change.seconds = gang.last[0] - step, gang.last[1] - at
        change.attempt, change.held_by_processes = len(gang.restored), self._held()
        self.changes.append(change)
        if len(self.changes) % 20 == 0:
            print(f"{len(self.changes)} changes, step {gang.last[0]}, {change.held_by_processes}", flush=True)

    def _until(self, is_so: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"the run has not adapted to {self._nodes.names} within {PATIENCE:.0f} s")
            time.sleep(0.01)

    def _held(self) -> dict[str, float]:
        """What this process, which is the controller, and the lasting processes below it hold."""
        here = psutil.Process()
        lasting = [here, *(each for each in here.children() if LASTING & set(each.cmdline()))]
        assert len(lasting) == 1 + len(LASTING), lasting
        return {
            "processes": len(here.children(recursive=True)),
            "threads": sum(process.num_threads() for process in lasting),
            "files": sum(process.num_fds() for process in lasting),
            "memory": sum(process.memory_full_info().uss for process in lasting),
            "disk": sum(size(path) for path in self._folder.rglob("*") if not GROWS & set(path.parts)),
        }


def size(path: Path) -> int:
    """The bytes of a file; 0 of a folder, and of what is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def main() -> int:
    """Run the week; print and store what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changes", type=int, default=336)
    parser.add_argument("--kills", type=int, default=164)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no further change comes after these")
    parser.add_argument("--roomy", type=float, default=2.0, help="seconds of room before the run grows")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")  # what is left there is counted
    waited_less, decide.ROOMY = decide.ROOMY - options.roomy, options.roomy
    shared = SharedImports(f"week-{os.getpid()}", ENTRY)
    gang = WeekGang(Nodes(NODES))
    run_task = functools.partial(CallInCopy, shared.name)
    controller = controller_on(job(folder), str(folder / "run"), folder / "cache", gang, run_task)
    weather = Weather(gang, folder, options)
    weather.stop = lambda: controller.request_stop("the week is over")
    began = time.monotonic()
    weather.start()
    try:
        summary = controller.drive()
    finally:
        gang.nodes.stop()
        gang.end()
        shared.close()
    (folder / "week.json").write_text(json.dumps([dataclasses.asdict(change) for change in weather.changes]))
    print(f"{summary['state']} after {time.monotonic() - began:.0f} s, {gang.last[0]} steps; {weather.error}")
    if weather.error:
        return 1
    goodput = account(weather.changes, gang.paces, waited_less)
    return int(leaks(weather.changes, folder) or goodput < GOODPUT)


def account(changes: list[Change], paces: dict[int, list[float]], waited_less: float) -> float:
    """Print what the changes cost, and return the goodput of the week as a share of the oracle's."""
    pace = {nodes: statistics.median(seconds) for nodes, seconds in paces.items()}
    undisturbed = sum(len(paces[n]) * pace[n] for n in pace) / sum(sum(seconds) for seconds in paces.values())
    weather = [change for change in changes if change.kind != "killed"]
    oracle = sum(HALF_HOUR / pace[change.after] for change in weather)
    up = statistics.fmean(change.after for change in weather)
    print(f"{len(weather)} changes, {up:.2f} nodes up on average; a step: " + ", ".join(
        f"{1e3 * pace[nodes]:.1f} ms on {nodes}" for nodes in sorted(pace)
    ))  # fmt: skip
    print("| | times | until the next step, median | most | missed, median | mean | of the week |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("lost", "noticed", "added", "killed"):
        if some := [change for change in changes if change.kind == kind]:
            adapted = [change.adapted for change in some]
            missed = [change.missed(pace, waited_less) for change in some]
            seconds = [steps * pace[change.after] for steps, change in zip(missed, some, strict=True)]
            print(
                f"| {kind} | {len(some)} | {statistics.median(adapted):.2f} s | {max(adapted):.1f} s "
                f"| {statistics.median(seconds):.2f} s | {statistics.fmean(seconds):.2f} s "
                f"| {sum(missed) / oracle:.2%} |"
            )
    missed_steps = sum(change.missed(pace, waited_less) for change in changes)
    goodput = undisturbed * (1.0 - missed_steps / oracle)
    run = sum(change.steps for change in changes)
    here = run / sum(change.steps + change.missed(pace) for change in changes)
    print(
        f"goodput of the week over the oracle's {goodput:.4f}: changes and kills {missed_steps / oracle:.2%}, "
        f"evaluations, checkpoints and uneven steps {1 - undisturbed:.2%}; of what was run here {here:.3f}"
    )
    return goodput


def leaks(changes: list[Change], folder: Path) -> bool:
    """Print what an attempt adds, draw it, and return whether anything is beyond its bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    full = [change for change in changes if change.after == NODES]  # others have fewer ranks
    attempts = [change.attempt for change in full]
    third = len(full) // 3
    figure, axes = pyplot.subplots(len(BOUNDS), 1, figsize=(8, 10), sharex=True)
    print(
        "| of the lasting processes | first third | last third | added by an attempt | bound |\n|---|---|---|---|---|"
    )
    beyond = False
    for (name, bound), panel in zip(BOUNDS.items(), axes, strict=True):
        values = [change.held_by_processes[name] for change in full]
        scale, unit = (1e6, " MB") if bound > 1 else (1.0, "")
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        apart = statistics.median(attempts[-third:]) - statistics.median(attempts[:third])
        added = (last - first) / apart
        beyond |= added > bound
        per = f"{added / 1e3:.2f} kB" if unit else f"{added:.4f}"
        most = f"{bound / 1e3:.0f} kB" if unit else f"{bound}"
        print(f"| {name} | {first / scale:.4g}{unit} | {last / scale:.4g}{unit} | {per} | {most} |")
        panel.plot(attempts, [value / scale for value in values], ".", markersize=3)
        panel.set_ylabel(name + unit)
        panel.set_ylim(bottom=0)
    axes[-1].set_xlabel("attempt")
    figure.tight_layout()
    figure.savefig(folder / "week.png", dpi=90)
    return beyond


if __name__ == "__main__":
    sys.exit(main())

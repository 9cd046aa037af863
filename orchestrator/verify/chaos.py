"""Chaos: inject faults into runs, and check that each result equals the undisturbed run.

The job is trained once undisturbed and once for each fault, on real Ray nodes of this machine. The comparison covers
the receipt of every step, the losses, and leftover processes and resources.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.local import external_faults
from cluster.local.external_faults import ExternalFault, wait_for
from cluster.local.local_cluster import LocalCluster, NodeSpec, claimed, down, up
from cluster.local.node_processes import ClusterError
from cluster.local.ray_session import connected_ray
from cluster.workers.injected_faults import FaultSpec
from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.packages import PACKAGES
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, dump, load
from orchestrator.controller.run_history import EVENTS, METRICS
from orchestrator.evaluate.config import without_tasks
from orchestrator.resolve.precision import as_its_run
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.train.config import TrainSpec
from orchestrator.tune.space import job_of
from orchestrator.verify.comparison import RunComparison, RunEnd, compare, leftovers_of

CLUSTER = "chaos"
TRIAL_TIMEOUT = 2700.0
"""The maximum seconds of one run, with all its faults."""
STANDARD = (
    "kill@1:{a}", "kill@0:{a}", "stop@1:{a}", "raise@0:{a}", "slow@1:{a}=0.2", "nan@0:{a}", "driver@{a}",
    "controller@{a}", "node@1:{a}", "drain@1:{a}", "flip@{a}", "torn@{a}", "outage@{a}=2",
)  # fmt: skip
"""Default faults, at a step in the middle of the run, for the ranks that exist."""


def expand(
    faults: Sequence[str], randoms: int, seed: int, resources: ResourceSpec, train: TrainSpec
) -> list[tuple[str, ...]]:
    """Return the faults of each disturbed run: one run for each named fault, and one for all random ones.

    Raises InputError for an invalid fault, and for a step or rank that the job does not have.
    """
    steps, world = train.steps, resources.workers.max
    if not faults and not randoms:
        standard = [text.format(a=max(steps // 2, 2)) for text in STANDARD]
        faults = [text for text in standard if _fault(text).rank < world]
    for text in faults:
        fault = _fault(text)
        if not 1 <= fault.step <= steps or fault.rank >= world:
            what = f"{text} is beyond the job's {steps} steps and {world} workers"
            raise InputError(what, "--fault", "choose a step and a rank that there are")
    runs: list[tuple[str, ...]] = [(text,) for text in faults]
    if randoms:
        runs.append(tuple(_random(randoms, seed, steps, world)))
    return runs


def _fault(text: str) -> ExternalFault | FaultSpec:
    try:
        return ExternalFault.parse(text) or FaultSpec.parse(text)
    except ValueError as error:
        raise InputError(f"{text!r} is no fault", "--fault", str(error)) from None


def _random(count: int, seed: int, steps: int, world: int) -> Iterator[str]:
    """Return kills, stops and exceptions at random ranks and steps."""
    if 2 * count >= steps:
        raise InputError(
            f"{count} random faults need more than {steps} steps",
            "--random",
            f"raise train.steps above {2 * count}",
        )
    generator = random.Random(seed)
    # Never two consecutive steps: the step that a rank had reached is known only to within one.
    at_steps = sorted(generator.sample(range(2, steps + 1, 2), count))
    for step in at_steps:
        kind = generator.choices(["kill", "stop", "raise"], [8, 1, 1])[0]
        yield f"{kind}@{generator.randrange(world)}:{step}/*"


def chaos(
    spec: JobSpec,
    runs: Path,
    disturbed: Sequence[tuple[str, ...]],
    report: Callable[[RunComparison | str], None],
) -> list[RunComparison]:
    """Train undisturbed and then with faults, on a local cluster with one node for each worker.

    `report` gets a line when a part begins and each comparison when it is done. Raises InputError if another chaos runs
    on this machine, because each removes the leftovers of earlier ones.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(claimed(CLUSTER, "chaos"))
        except ClusterError as error:
            raise InputError(str(error)) from None
        return _chaos(spec, runs, disturbed, report)


def _chaos(
    spec: JobSpec,
    runs: Path,
    disturbed: Sequence[tuple[str, ...]],
    report: Callable[[RunComparison | str], None],
) -> list[RunComparison]:
    runs.mkdir(parents=True, exist_ok=True)
    job = _job(spec, runs)
    worker, world = spec.resources.per_worker, spec.resources.workers.max
    node = NodeSpec("", "", cpus=max(worker.cpu, 1), gpus=worker.gpu)
    report(f"a cluster of {world} nodes")
    down(CLUSTER)
    cluster = up(CLUSTER, [node] * world)
    try:
        # Connect through the head: any other node may be killed, which would end this process too.
        head = cluster.address.partition(":")[0]
        with (
            open(runs / "ray.log", "w") as news,
            connected_ray(cluster.address, node=head, output=news, packages=PACKAGES),
        ):
            report("the undisturbed run")
            undisturbed = ChaosRun(job, runs / "undisturbed", cluster, ())
            if undisturbed.run() != "done":
                raise InputError(
                    f"the undisturbed run is {undisturbed.ended}",
                    str(undisturbed.folder),
                    "fix the job first",
                )
            # Automatic choices of the first run also apply to the runs that are compared with it.
            asked = load(job)
            train = as_its_run(asked.train, undisturbed.run_dir)
            job.write_text(dump(asked.with_parts(train=train)))
            comparisons = []
            for number, faults in enumerate(disturbed):
                name = faults[0] if len(faults) == 1 else f"{len(faults)} random faults"
                folder = f"{number:02d}-" + "".join(c if c.isalnum() else "-" for c in name)
                run = ChaosRun(job, runs / folder, cluster, faults)
                run.run()
                comparisons.append(compare(name, run.end(), undisturbed.rows(), faults))
                report(comparisons[-1])
            return comparisons
    finally:
        down(CLUSTER)


def _job(spec: JobSpec, runs: Path) -> Path:
    """Return the job with many restarts, and without exports, tracking, messages, labels, and
    limits of time and cost.
    """
    spec = spec.model_copy(update={"evaluate": without_tasks(spec.evaluate, spec.set_names)})
    changed = dict.fromkeys(("tracking", "notify", "sinks", "limits.hours", "limits.cost_usd"))
    changed |= {f"checkpoint.{key}": value for key, value in NO_EXPORT.items()}
    changed |= {"limits.restarts": 100_000}
    path = runs / "job.yaml"
    path.write_text(dump(job_of(spec, {**changed, "resources.per_worker.labels": {}})))
    return path


class ChaosRun:
    """A run in its own folder, with the faults that are injected into it.

    Rank faults are passed to the command; this process applies external ones.
    """

    def __init__(self, job: Path, folder: Path, cluster: LocalCluster, faults: Sequence[str]) -> None:
        self.folder = folder
        self.run_dir = RunDir(str(folder))
        self._cluster = cluster
        found = [(text, ExternalFault.parse(text)) for text in faults]
        self._faults = sorted((f for _, f in found if f is not None), key=lambda f: f.step)
        inner = [word for text, f in found if f is None for word in ("--fault", text)]
        self._command = [sys.executable, "-m", "orchestrator", "run", str(job), "--run-dir", str(folder)]
        self._command += ["--address", cluster.address, *inner]
        self.fault_times: list[float] = []
        self.ended, self.seconds = "not started", 0.0

    def run(self) -> str:
        """Run the command until the run has ended, restarting it after each fault that ends it. Return the outcome."""
        began = time.monotonic()
        with open(self.folder.with_suffix(".log"), "w") as log:
            while True:
                process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                try:
                    self._inject_faults(process)
                    code = process.wait(TRIAL_TIMEOUT)
                except (TimeoutError, subprocess.TimeoutExpired) as error:
                    self.ended = f"no end: {error}"
                    break
                finally:
                    external_faults.kill_tree(process.pid)
                    process.wait()
                outcome = Outcome.of_exit(code)
                self.ended = outcome or f"ended with exit code {code}"
                if outcome in (Outcome.DONE, Outcome.FAILED, Outcome.WRONG_INPUT):
                    break
        self.seconds = time.monotonic() - began
        return self.ended

    def rows(self) -> list[Row]:
        """Return the metrics rows, one per step."""
        return self.run_dir.rows(METRICS)

    def end(self) -> RunEnd:
        """Return the compared values: rows, events, duration, and leftover processes and files."""
        left = leftovers_of(self._cluster.folder)
        events = self.run_dir.rows(EVENTS)
        return RunEnd(
            self.ended,
            self.seconds,
            fault_times=tuple(self.fault_times),
            rows=self.rows(),
            events=events,
            left=left,
        )

    def _inject_faults(self, process: subprocess.Popen[bytes]) -> None:
        """Apply each external fault when the run reaches its step."""
        while self._faults and process.poll() is None:
            fault = self._faults[0]
            if self._step() < fault.step:
                time.sleep(0.01)
                continue
            self._faults.pop(0)
            self.fault_times.append(time.time())
            self._apply(fault, process)

    def _apply(self, fault: ExternalFault, process: subprocess.Popen[bytes]) -> None:
        match fault.kind:
            case "driver":
                process.kill()
            case "controller":
                external_faults.kill(int(self._status()["pid"]))
            case "node":
                external_faults.lose_node(self._cluster, self._node_of(fault.rank))
            case "drain":
                external_faults.drain_node(self._cluster, self._node_of(fault.rank))
            case "flip" | "torn":
                command = [sys.executable, "-m", "orchestrator", "stop", str(self.folder)]
                subprocess.run(command, check=False, capture_output=True, timeout=TRIAL_TIMEOUT)
                process.wait(TRIAL_TIMEOUT)
                shard = external_faults.newest_shard(self.folder / COMMITS)
                (external_faults.flip_bit if fault.kind == "flip" else external_faults.truncate)(shard)
            case "outage" | "full":
                folder = self.folder / COMMITS if fault.kind == "outage" else self.folder
                with (
                    external_faults.outage(folder) if fault.kind == "outage" else external_faults.full(folder)
                ):
                    time.sleep(fault.seconds)

    def _step(self) -> int:
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def _status(self) -> dict[str, Any]:
        return dict(self.run_dir.read_json("status.json"))

    def _node_of(self, rank: int) -> str:
        def node() -> str:
            return next((str(r["node"]) for r in self._status()["ranks"] if r["rank"] == rank), "")

        return str(wait_for(node, f"rank {rank} to have a node", 30.0))

"""Break a run on purpose, and see whether it stays the same run.

The job is trained once undisturbed and once for each fault, on real Ray nodes of this machine, and what must not
differ is compared: the receipt of every step, the losses, and that nothing is left behind.
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

from cluster.local import external_faults as strikes
from cluster.local.external_faults import ExternalFault, wait_for
from cluster.local.local_cluster import LocalCluster, NodeSpec, claimed, down, up
from cluster.local.node_processes import ClusterError
from cluster.local.ray_session import connected_ray
from orchestrator.control.run_history import EVENTS, METRICS
from orchestrator.job.errors import InputError
from orchestrator.job.outcome import Outcome
from orchestrator.job.spec import JobSpec, dump
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.tune.space import job_of
from orchestrator.verify.comparison import RunComparison, RunEnd, compare, left_of

CLUSTER = "chaos"
TRIAL_TIMEOUT = 2700.0
"""Seconds that one run may take, however disturbed."""
STANDARD = (
    "kill@1:{a}", "kill@0:{a}", "stop@1:{a}", "raise@0:{a}", "slow@1:{a}=0.2", "nan@0:{a}", "driver@{a}",
    "controller@{a}", "node@1:{a}", "drain@1:{a}", "flip@{a}", "torn@{a}", "outage@{a}=2",
)  # fmt: skip
"""Faults where none are named, at a step in the middle."""


def expand(faults: Sequence[str], randoms: int, seed: int, spec: JobSpec) -> list[tuple[str, ...]]:
    """The faults of each disturbed run: one run for each that is named, one for all the random ones.

    Raises InputError for a word that is no fault, or a step that the job does not have.
    """
    steps, world = spec.train.steps, spec.resources.workers.max
    if not faults and not randoms:
        faults = [text.format(a=max(steps // 2, 2)) for text in STANDARD]
    for text in faults:
        _check(text, steps, world)
    runs: list[tuple[str, ...]] = [(text,) for text in faults]
    if randoms:
        runs.append(tuple(_random(randoms, seed, steps, world)))
    return runs


def _check(text: str, steps: int, world: int) -> None:
    from cluster.workers.injected_faults import FaultSpec

    try:
        fault = ExternalFault.parse(text) or FaultSpec.parse(text)
    except ValueError as error:
        raise InputError(f"{text!r} is no fault", "--fault", str(error)) from None
    if not 1 <= fault.step <= steps or fault.rank >= world:
        what = f"{text} is beyond the job's {steps} steps and {world} workers"
        raise InputError(what, "--fault", "choose a step and a rank that there are")


def _random(count: int, seed: int, steps: int, world: int) -> Iterator[str]:
    """Deaths, freezes and exceptions at random ranks, spread over the steps."""
    if 2 * count >= steps:
        raise InputError(
            f"{count} random faults need more than {steps} steps",
            "--random",
            f"raise train.steps above {2 * count}",
        )
    generator = random.Random(seed)
    # Not at two steps running: which of them was begun is known to one step.
    places = sorted(generator.sample(range(2, steps + 1, 2), count))
    for step in places:
        kind = generator.choices(["kill", "stop", "raise"], [8, 1, 1])[0]
        yield f"{kind}@{generator.randrange(world)}:{step}/*"


def chaos(
    spec: JobSpec,
    runs: Path,
    disturbed: Sequence[tuple[str, ...]],
    tell: Callable[[RunComparison | str], None],
) -> list[RunComparison]:
    """Train undisturbed and then disturbed, on a local cluster of one node for each worker. `tell` hears of each.

    Raises InputError if another chaos is at work on this machine: each ends what an earlier one has left.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(claimed(CLUSTER, "chaos"))
        except ClusterError as error:
            raise InputError(str(error)) from None
        return _chaos(spec, runs, disturbed, tell)


def _chaos(
    spec: JobSpec,
    runs: Path,
    disturbed: Sequence[tuple[str, ...]],
    tell: Callable[[RunComparison | str], None],
) -> list[RunComparison]:
    runs.mkdir(parents=True, exist_ok=True)
    job = _job(spec, runs)
    worker, world = spec.resources.per_worker, spec.resources.workers.max
    node = NodeSpec("", "", cpus=max(worker.cpu, 1), gpus=worker.gpu)
    tell(f"a cluster of {world} nodes")
    down(CLUSTER)
    cluster = up(CLUSTER, [node] * world)
    try:
        # By the head: another node may be one that is broken, and would take this process along.
        head = cluster.address.partition(":")[0]
        with open(runs / "ray.log", "w") as news, connected_ray(cluster.address, node=head, output=news):
            tell("the undisturbed run")
            quiet = ChaosRun(job, runs / "undisturbed", cluster, ())
            if quiet.run() != "done":
                raise InputError(
                    f"the undisturbed run is {quiet.ended}", str(quiet.folder), "fix the job first"
                )
            verdicts = []
            for number, faults in enumerate(disturbed):
                name = faults[0] if len(faults) == 1 else f"{len(faults)} random faults"
                folder = f"{number:02d}-" + "".join(c if c.isalnum() else "-" for c in name)
                trial = ChaosRun(job, runs / folder, cluster, faults)
                trial.run()
                verdicts.append(compare(name, trial.told(), quiet.rows(), faults))
                tell(verdicts[-1])
            return verdicts
    finally:
        down(CLUSTER)


def _job(spec: JobSpec, runs: Path) -> Path:
    """The job without what has nothing to do with being the same run, and with any number of restarts."""
    changed = {"tracking": None, "limits.restarts": 100_000, "checkpoint.export": None}
    path = runs / "job.yaml"
    path.write_text(dump(job_of(spec, {**changed, "resources.per_worker.labels": {}})))
    return path


class ChaosRun:
    """One run in a folder of its own, and what befalls it."""

    def __init__(self, job: Path, folder: Path, cluster: LocalCluster, faults: Sequence[str]) -> None:
        self.folder, self.run_dir, self._cluster = folder, RunDir(str(folder)), cluster
        found = [(text, ExternalFault.parse(text)) for text in faults]
        self._strikes = sorted((s for _, s in found if s is not None), key=lambda s: s.step)
        inner = [word for text, s in found if s is None for word in ("--fault", text)]
        self._words = [sys.executable, "-m", "orchestrator", "run", str(job), "--run-dir", str(folder)]
        self._words += ["--address", cluster.address, *inner]
        self.struck: list[float] = []
        self.ended, self.seconds = "not started", 0.0

    def run(self) -> str:
        """To its end, given again where the fault ended the command; how it ended."""
        began = time.monotonic()
        with open(self.folder.with_suffix(".log"), "w") as log:
            while True:
                process = subprocess.Popen(self._words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                try:
                    self._befall(process)
                    code = process.wait(TRIAL_TIMEOUT)
                except (TimeoutError, subprocess.TimeoutExpired) as error:
                    self.ended = f"no end: {error}"
                    break
                finally:
                    strikes.kill_tree(process.pid)
                    process.wait()
                outcome = Outcome.of_exit(code)
                self.ended = outcome or f"ended with exit code {code}"
                if outcome in (Outcome.DONE, Outcome.FAILED, Outcome.WRONG_INPUT):
                    break
        self.seconds = time.monotonic() - began
        return self.ended

    def rows(self) -> list[Row]:
        """A row a step."""
        return self.run_dir.rows(METRICS)

    def told(self) -> RunEnd:
        """What is to be compared."""
        left = left_of(self._cluster.folder)
        events = self.run_dir.rows(EVENTS)
        return RunEnd(self.ended, self.seconds, tuple(self.struck), self.rows(), events, left)

    def _befall(self, process: subprocess.Popen[bytes]) -> None:
        """Strike, each time the run has reached the step of a strike."""
        while self._strikes and process.poll() is None:
            strike = self._strikes[0]
            if self._step() < strike.step:
                time.sleep(0.01)
                continue
            self._strikes.pop(0)
            self.struck.append(time.time())
            self._strike(strike, process)

    def _strike(self, strike: ExternalFault, process: subprocess.Popen[bytes]) -> None:
        match strike.kind:
            case "driver":
                process.kill()
            case "controller":
                strikes.kill(int(self._status()["pid"]))
            case "node":
                strikes.lose_node(self._cluster, self._node_of(strike.rank))
            case "drain":
                strikes.drain_node(self._cluster, self._node_of(strike.rank))
            case "flip" | "torn":
                words = [sys.executable, "-m", "orchestrator", "stop", str(self.folder)]
                subprocess.run(words, check=False, capture_output=True, timeout=TRIAL_TIMEOUT)
                process.wait(TRIAL_TIMEOUT)
                shard = strikes.newest_shard(self.folder / "checkpoints")
                (strikes.flip_bit if strike.kind == "flip" else strikes.truncate)(shard)
            case "outage" | "full":
                place = self.folder / "checkpoints" if strike.kind == "outage" else self.folder
                with strikes.outage(place) if strike.kind == "outage" else strikes.full(place):
                    time.sleep(strike.seconds)

    def _step(self) -> int:
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def _status(self) -> dict[str, Any]:
        return dict(self.run_dir.read_json("status.json"))

    def _node_of(self, rank: int) -> str:
        def seen() -> str:
            return next((str(r["node"]) for r in self._status()["ranks"] if r["rank"] == rank), "")

        return str(wait_for(seen, f"rank {rank} to have a node", 30.0))

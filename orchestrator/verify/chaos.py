"""Chaos: inject faults into runs, and check that each result equals the undisturbed run.

The job is trained once undisturbed and once for each fault, on real Ray nodes of this machine. The comparison covers
the receipt of every step, the losses, and leftover processes and resources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.local.local_cluster import NodeSpec, claimed, down, up
from cluster.local.node_processes import ClusterError
from cluster.local.ray_session import connected_ray
from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.errors import InputError
from orchestrator.config.packages import PACKAGES
from orchestrator.config.resources import PerWorker
from orchestrator.config.spec import JobSpec, dump, load
from orchestrator.evaluate.config import without_tasks
from orchestrator.resolve.precision import as_its_run
from orchestrator.tune.space import job_of
from orchestrator.verify.chaos_run import ChaosRun
from orchestrator.verify.comparison import RunComparison, compare

CLUSTER = "chaos"


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
        runs.mkdir(parents=True, exist_ok=True)
        job = _job(spec, runs)
        return _compared(
            job, runs, disturbed, report, worker=spec.resources.per_worker, nodes=spec.all_workers.max
        )


def _compared(
    job: Path,
    runs: Path,
    disturbed: Sequence[tuple[str, ...]],
    report: Callable[[RunComparison | str], None],
    *,
    worker: PerWorker,
    nodes: int,
) -> list[RunComparison]:
    """Run the job in the file `job` undisturbed and then with faults, on so many nodes of a worker each. For the other
    arguments see `chaos`.
    """
    node = NodeSpec("", "", cpus=max(worker.cpu, 1), gpus=worker.gpu)
    report(f"a cluster of {nodes} nodes")
    down(CLUSTER)
    cluster = up(CLUSTER, [node] * nodes)
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
            spec = load(job)
            train = as_its_run(spec.train, undisturbed.run_dir)
            job.write_text(dump(spec.with_parts(train=train)))
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

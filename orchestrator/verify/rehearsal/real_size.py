"""The job at its own size: its planned layout, and whether that fits the workers that it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.job.errors import InputError
from orchestrator.planning.device import Machine
from orchestrator.planning.layout import Layout
from orchestrator.planning.memory import fits, offered
from orchestrator.planning.plan import Plan
from orchestrator.resolve.resolved_job import ResolvedJob

if TYPE_CHECKING:
    from orchestrator.tracing.of_plan import TracedMemory

SECONDS = 30.0
"""Of the processor, that the traces may take."""
MEND = "lower micro_batch, raise zero, tp, pp or workers, or set recompute"


@dataclass(frozen=True)
class Real:
    """The plan of a job at its size. `known` is False where nobody says for which GPUs it is. `traced` is the memory of
    its layout where it had to be known to choose it."""

    plan: Plan
    known: bool
    on_cpu: bool
    traced: TracedMemory | None = None

    @property
    def layout(self) -> Layout:
        """The layout that is planned."""
        return self.plan.chosen.layout

    def looked_at(self, job: ResolvedJob) -> tuple[str, str, str]:
        """What traces of the ranks that matter say: a line, and what is wrong with the mend, empty if nothing is."""
        from orchestrator.tracing.of_plan import traced_memory
        from orchestrator.track.page import size

        traced = self.traced or traced_memory(job, self.layout, SECONDS)
        largest = traced.largest
        needed, machine = traced.needed(self.plan.chosen.memory, self.on_cpu), self.plan.machine
        if largest:
            ranks = ", ".join(str(each.rank) for each in traced.traces)
            how = f"rank {ranks} of {self.layout.world} traced, rank {largest.rank} needs {size(needed)}"
        else:
            how = f"a rank needs {size(needed)} (not all were traced: {traced.reasons[0]})"
        if not self.known:
            return f"{how}; name the device by --machine to know whether it fits", "", ""
        there = size(offered(machine, self.on_cpu))
        if not fits(needed, machine, self.on_cpu):
            return "", f"{self.layout}: {how}, and a worker offers {there}", MEND
        return f"{how} of {there} that a worker offers", "", ""


def real_size(job: ResolvedJob, device: str | None) -> tuple[ResolvedJob, Real]:
    """The job on workers of a device, by the name or the file of its profile, else on those that the job names, else on
    this machine; and its plan there. Raises InputError if no layout is legal."""
    from orchestrator.planning.machines import on_paper
    from orchestrator.tracing.of_plan import confirmed

    spec, known = job.spec, True
    if device:
        spec, machine = on_paper(spec, device)
        job = replace(job, spec=spec)
    else:
        machine, known = _workers(job)
    try:
        found = confirmed(job, spec.resources.workers.max, machine)
    except InputError:  # none that fits: which would be fastest?
        found = confirmed(job, spec.resources.workers.max, machine, must_fit=False)
    return job, Real(found.plan, known, not spec.resources.per_worker.gpu, found.traced)


def _workers(job: ResolvedJob) -> tuple[Machine, bool]:
    """A worker as the job names it, or one on this machine; and whether that is known."""
    from cluster.render.node_selection import ACCELERATOR
    from cluster.workers.machine import Offer
    from orchestrator.launch.preflight import worker_here
    from orchestrator.planning.machines import machine_for
    from orchestrator.planning.profile import of_accelerator

    worker = job.spec.resources.per_worker
    if not worker.gpu:
        return worker_here(job.spec), True
    import torch

    name = worker.labels.get(ACCELERATOR, "")
    if of_accelerator(name) is not None:
        return machine_for(Offer(float("inf"), name), worker.bundle, job.spec.train.precision), True
    if torch.cuda.is_available():
        return worker_here(job.spec), True
    return machine_for(None, worker.bundle, job.spec.train.precision), False

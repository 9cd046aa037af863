"""Plan the job at its own size, and check whether the layout fits the workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.layout import Layout
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.choose_precision import MachineOf
from orchestrator.planner.device import Machine
from orchestrator.planner.machines import resources_on_device, worker_on_device
from orchestrator.planner.memory import fits, offered
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.train.config import Precision

if TYPE_CHECKING:
    from orchestrator.planner.trace.layout_memory import TracedMemory

SECONDS = 30.0
"""The maximum CPU seconds of the traces."""
MEND = "lower micro_batch, raise zero, tp, pp or workers, or set recompute"


@dataclass(frozen=True)
class FullSizePlan:
    """The plan of a job at its own size.

    `known` is False if the type of GPU is unknown. `traced` is the traced memory of its layout, if choosing the layout
    needed it.
    """

    plan: Plan
    is_known: bool
    on_cpu: bool
    traced: TracedMemory | None = None

    @property
    def layout(self) -> Layout:
        """Return the planned layout."""
        return self.plan.chosen.layout

    def traced_text(self, job: ResolvedJob) -> tuple[str, str, str]:
        """Trace the ranks that matter. Return a line, or a problem and its fix; the others are empty."""
        from orchestrator.observe.pages.page import size
        from orchestrator.planner.trace.layout_memory import traced_memory

        traced = self.traced or traced_memory(job, self.layout, SECONDS)
        largest = traced.largest
        needed, machine = traced.needed(self.plan.chosen.memory, self.on_cpu), self.plan.machine
        if largest:
            ranks = ", ".join(str(trace.rank) for trace in traced.traces)
            how = f"rank {ranks} of {self.layout.world} traced, rank {largest.rank} needs {size(needed)}"
        else:
            how = f"a rank needs {size(needed)} (not all were traced: {traced.reasons[0]})"
        if not self.is_known:
            return f"{how}; name the device by --machine to know whether it fits", "", ""
        available = size(offered(machine, self.on_cpu))
        if not fits(needed, machine, self.on_cpu):
            return "", f"{self.layout}: {how}, but a worker offers {available}", MEND
        return f"{how} of {available} that a worker offers", "", ""


def worker_of(device: str | None) -> MachineOf:
    """Return the function that gives a job's worker.

    The worker is `device`, by the name or the file of its profile, else as the job names it, else this machine.
    """
    if device:
        return lambda asked, precision: worker_on_device(
            resources_on_device(asked, device), precision, device
        )
    return lambda asked, precision: _worker(asked, precision)[0]


def plan_at_full_size(job: ResolvedJob, device: str | None) -> tuple[ResolvedJob, FullSizePlan]:
    """Return the job for such workers, see `worker_of`, and its plan there. Raises InputError if no layout is legal."""
    from orchestrator.planner.trace.layout_memory import plan_with_traces

    spec, is_known = job.spec, True
    if device:
        spec = spec.with_parts(resources=resources_on_device(spec.resources, device))
        job, machine = (
            replace(job, spec=spec),
            worker_on_device(spec.resources, spec.train.dtype, device),
        )
    else:
        machine, is_known = _worker(spec.shared_resources, spec.train.dtype)
    confirmed_plan = plan_with_traces(job, spec.resources.workers.max, machine, must_fit=False)
    return job, FullSizePlan(
        confirmed_plan.plan, is_known, not spec.resources.per_worker.gpu, confirmed_plan.traced
    )


def _worker(resources: ResourceSpec, precision: Precision) -> tuple[Machine, bool]:
    """Return a worker as the job names it, or one on this machine, and whether its type is known."""
    from orchestrator.launch.worker import local_worker, worker_named

    if (named := worker_named(resources)) is not None:
        return named(resources, precision), True
    if not resources.per_worker.gpu:
        return local_worker(resources, precision), True
    import torch

    return local_worker(resources, precision), torch.cuda.is_available()

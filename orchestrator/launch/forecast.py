"""The forecast of a planned job on a cluster."""

from __future__ import annotations

from typing import Any

from orchestrator.controller.forecast_table import forecast
from orchestrator.controller.state import policy_of
from orchestrator.launch.planned_job import PlannedJob
from orchestrator.parallel.config import ParallelSpec
from orchestrator.planner.cluster_file import ClusterFile
from orchestrator.planner.demand import demand_of
from orchestrator.planner.host_memory import state_bytes
from orchestrator.planner.planner import Planner


def forecast_of(planned: PlannedJob, cluster: ClusterFile) -> dict[str, Any]:
    """Return the forecast of the run on a cluster, see `orchestrator.controller.forecast_table.forecast`.

    The layout is pinned, and evaluations, exports and limits are left out: the forecast covers the steps only.
    """
    job, shape = planned.job.spec, planned.job.shape
    pinned = job.with_parts(
        parallel=ParallelSpec(**planned.plan.chosen.layout.pins),
        evaluate=None,
        stop_when=None,
        limits=job.limits.model_copy(update={"hours": None, "cost_usd": None}),
        checkpoint=job.checkpoint.model_copy(update={"export": None}),
        resources=job.resources.model_copy(update={"must_fit": False}),
    )
    demand = demand_of(pinned)
    planner = Planner(demand, shape, planned.plan.machine)
    policy = policy_of(pinned, planner.choose, predict=planner.seconds)
    state = state_bytes(demand.optimizer, demand.ema, shape, pruned=demand.pruned)
    return forecast(policy, planned.plan, cluster, state)

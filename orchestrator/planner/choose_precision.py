"""The choice of precision for a job with `train.precision: auto`. Torch-free and ray-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.validation_messages import input_error
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import MEMORY_SHARE
from orchestrator.planner.planner import best_of, planned
from orchestrator.train.config import Precision, TrainSpec

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
"""From the widest numbers to those that need a loss scale. Among equally fast ones the first is chosen.

fp8 is never chosen automatically, because it changes numerics.
"""

MachineOf = Callable[[ResourceSpec, Precision], Machine]
"""Returns a worker with these resources, which trains in that precision."""


@dataclass(frozen=True)
class Choice:
    """The chosen precision and the alternatives.

    Attributes:
        plans: the best plan in each precision that the job allows; empty if the run began with `precision`.
        rejected: why the other precisions are not allowed.
        equal: precisions that count as equally good.
    """

    precision: Precision
    plans: tuple[tuple[Precision, Plan], ...] = ()
    rejected: tuple[tuple[Precision, str], ...] = ()
    equal: tuple[Precision, ...] = ()

    def __str__(self) -> str:
        """Return the choice and its reasons as one line."""
        if not self.plans:
            return f"{self.precision}, which the run started with"
        plans = dict(self.plans)
        line = f"{self.precision}: {_plan_text(plans.pop(self.precision))}"
        for precision, plan in plans.items():
            line += f", {precision} {_plan_text(plan)}{', which counts as equal' * (precision in self.equal)}"
        return "; ".join([line, *(f"{precision}: {reason}" for precision, reason in self.rejected)])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain data, for `plan --json`."""
        return {
            "chosen": self.precision,
            "why": str(self),
            "candidates": [
                {"precision": precision, **plan.chosen.to_json(), "fits": plan.fits}
                for precision, plan in self.plans
            ],
            "rejected": [{"precision": precision, "reason": reason} for precision, reason in self.rejected],
        }


def in_precision(train: TrainSpec, precision: Precision) -> TrainSpec:
    """Return how the job trains, in that precision. Raises InputError if the job does not allow it.

    Args:
        train: the key `train` of the job.
        precision: the precision to train in.
    """
    try:
        TrainSpec.model_validate({**train.model_dump(mode="json"), "precision": precision})
    except ValidationError as error:
        raise input_error(error, "train", TrainSpec) from None
    return train.model_copy(update={"precision": precision})


def choose_precision(
    demand_in: Callable[[Precision], Demand], shape: ModelShape, machine_of: MachineOf
) -> Choice:
    """Choose the precision with the best predicted objective, among those in which the job fits.

    The widest precision within TIE of the best wins. If the job fits in none, the one that needs least memory is
    chosen, and the later check of the plan refuses it unless the job need not fit. Each precision is planned as if the
    job named it.

    Args:
        demand_in: returns what the job asks of the planner in a precision. Raises InputError if the job does not allow
            it.
        shape: the sizes of its model.
        machine_of: returns the machine of a worker in a precision.

    Raises:
        InputError: if the job has a plan in no precision.
    """
    plans: dict[Precision, Plan] = {}
    rejected: list[tuple[Precision, InputError]] = []
    demand = demand_in("bf16")
    resources = demand.resources
    machine_in_bf16 = machine_of(demand.shared_resources, "bf16")
    for precision in PRECISIONS:
        if precision == "fp16" and _has_bf16(resources, machine_in_bf16):
            continue
        try:
            demand_in_precision = demand_in(precision)
            machine = (
                machine_in_bf16 if precision == "bf16" else machine_of(demand.shared_resources, precision)
            )
            plans[precision] = planned(
                demand_in_precision, shape, resources.workers.max, machine, must_fit=False
            )
        except InputError as error:
            rejected.append((precision, error))
    if not plans:
        raise rejected[0][1]
    fit = [plan for plan in plans.values() if plan.fits]
    best = best_of(demand, fit) if fit else [min(plans.values(), key=lambda plan: plan.chosen.memory)]
    equal = tuple(name for name, plan in plans.items() if plan in best)
    return Choice(
        equal[0], tuple(plans.items()), tuple((name, str(error.what)) for name, error in rejected), equal
    )


def _has_bf16(resources: ResourceSpec, machine: Machine) -> bool:
    """Return whether workers support bf16, so that fp16 is not needed.

    True for CPUs, where fp16 is no faster, and for a GPU without a profile, whose support is unknown.
    """
    if not resources.per_worker.gpu or machine.stands_for:
        return True
    # A GPU without bf16 units has a bf16 rate in its profile that is no higher than that of fp32.
    return machine.flops > machine.full_flops


def _plan_text(plan: Plan) -> str:
    if not plan.fits:
        needed = plan.chosen.memory / 2**30
        available = plan.machine.memory * MEMORY_SHARE / 2**30
        return f"needs {needed:.2f} GiB per rank, but a worker offers {available:.2f} GiB"
    return f"{plan.chosen.seconds:.3g} s per step"

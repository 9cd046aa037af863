"""The precision of a job that leaves it to the planner (`train.precision: auto`). Torch-free and ray-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec
from orchestrator.config.validation_messages import input_error
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import MEMORY_SHARE
from orchestrator.planner.planner import best_of, planned
from orchestrator.train.config import Precision, TrainSpec

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
"""From the widest numbers to those that need a loss scale: of some that are equally fast the first is taken."""

MachineOf = Callable[[JobSpec], Machine]
"""The machine of a worker of a job, whose precision is known."""


@dataclass(frozen=True)
class Choice:
    """The precision that was chosen, the plans in each that the job may train in, and why it may not in others; `equal`
    are those that count as equally good. Without plans it is the one that the run has begun with."""

    precision: Precision
    plans: tuple[tuple[Precision, Plan], ...] = ()
    rejected: tuple[tuple[Precision, str], ...] = ()
    equal: tuple[Precision, ...] = ()

    def __str__(self) -> str:
        """The choice and why, as a line without its end."""
        if not self.plans:
            return f"{self.precision}, which the run has begun with"
        plans = dict(self.plans)
        line = f"{self.precision}: {_told(plans.pop(self.precision))}"
        for precision, found in plans.items():
            line += f", {precision} {_told(found)}{', which counts as equal' * (precision in self.equal)}"
        return "; ".join([line, *(f"{precision}: {reason}" for precision, reason in self.rejected)])

    def to_json(self) -> dict[str, Any]:
        """The choice as plain data, for `plan --json`."""
        return {
            "chosen": self.precision,
            "why": str(self),
            "candidates": [
                {"precision": precision, **found.chosen.to_json(), "fits": found.fits}
                for precision, found in self.plans
            ],
            "rejected": [{"precision": precision, "reason": reason} for precision, reason in self.rejected],
        }


def in_precision(spec: JobSpec, precision: Precision) -> JobSpec:
    """The job in that precision. Raises InputError if it may not train in it."""
    try:
        TrainSpec.model_validate({**spec.train.model_dump(mode="json"), "precision": precision})
    except ValidationError as error:
        raise input_error(error, "train", TrainSpec) from None
    return spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})


def chosen(spec: JobSpec, shape: ModelShape, machine_of: MachineOf) -> Choice:
    """The precision in which the job is predicted to be best by its objective, of those in which it fits; of some that
    are within TIE of that the widest. If it fits in none, that which needs least memory: what is checked of a plan
    refuses it then, or the job says that it need not fit.

    Each is planned as if the job named it. Raises InputError if the job has a plan in none.
    """
    plans: dict[Precision, Plan] = {}
    rejected: list[tuple[Precision, InputError]] = []
    narrow = machine_of(in_precision(spec, "bf16"))
    for precision in PRECISIONS:
        if precision == "fp16" and _has_bf16(spec.resources, narrow):
            continue
        try:
            there = in_precision(spec, precision)
            machine = narrow if precision == "bf16" else machine_of(there)
            most = spec.resources.workers.max
            plans[precision] = planned(there, shape, most, machine, must_fit=False)
        except InputError as error:
            rejected.append((precision, error))
    if not plans:
        raise rejected[0][1]
    fit = [found for found in plans.values() if found.fits]
    best = best_of(spec, fit) if fit else [min(plans.values(), key=lambda found: found.chosen.memory)]
    equal = tuple(each for each, found in plans.items() if found in best)
    return Choice(
        equal[0], tuple(plans.items()), tuple((each, str(error.what)) for each, error in rejected), equal
    )


def _has_bf16(resources: ResourceSpec, machine: Machine) -> bool:
    """Whether workers have bf16 of their own, and need no fp16. A CPU's fp16 is no faster, and of a device without a
    profile it is not known what it has."""
    if not resources.per_worker.gpu or machine.stands_for:
        return True
    return machine.flops > machine.full_flops


def _told(found: Plan) -> str:
    if not found.fits:
        needed, there = found.chosen.memory / 2**30, found.machine.memory * MEMORY_SHARE / 2**30
        return f"needs {needed:.2f} GiB a rank and a worker offers {there:.2f} GiB"
    return f"{found.chosen.seconds:.3g} s a step"

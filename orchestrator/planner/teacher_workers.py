"""The memory and the seconds of teacher workers, which compute logits beside the training workers. Torch-free and
ray-free.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.resources import Workers
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import PROCESS, offered, whole_teacher_bytes
from orchestrator.planner.rollouts import pass_seconds, too_large
from orchestrator.train.distillation.config import rows_of_pass


@dataclass(frozen=True)
class TeacherPlan:
    """The prediction of a job's teacher workers.

    Attributes:
        workers: how many the job asks for.
        worker_bytes: memory that each needs.
        offered_bytes: memory that a worker offers.
        batch_seconds: seconds in which one computes the logits of a step's samples.
        train_seconds: seconds of a step whose logits are there.
    """

    workers: Workers
    worker_bytes: float
    offered_bytes: float
    batch_seconds: float
    train_seconds: float

    @property
    def fits(self) -> bool:
        """Whether a teacher worker fits the memory of a worker."""
        return self.worker_bytes <= self.offered_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step while logits are still computed, by the largest number of teacher workers."""
        return max(self.train_seconds, self.batch_seconds / self.workers.max)

    def text(self, size: Any, duration: Any) -> list[str]:
        """Return lines for people; `size` and `duration` write bytes and seconds."""
        count = self.workers.max
        many = "1 teacher worker needs" if count == 1 else f"{count} teacher workers need"
        lines = [
            f"A teacher worker needs {size(self.worker_bytes)}"
            + ("." if self.fits else f"; a worker offers only {size(self.offered_bytes)}."),
            f"{many} {duration(self.batch_seconds / count)} for the logits of a step, which takes "
            f"{duration(self.train_seconds)} once they are there.",
        ]
        if self.workers.min == 0:
            lines.append(
                "Without room for one, each training worker holds the teacher before the first step: "
                f"{size(self.worker_bytes)} besides its own weights, which its memory above counts."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        return {
            "workers": self.workers.max,
            "worker_memory_bytes": round(self.worker_bytes),
            "fits": self.fits,
            "batch_seconds": self.batch_seconds,
            "step_seconds": self.step_seconds,
        }


def plan_teacher_workers(demand: Demand, shape: ModelShape, plan: Plan) -> TeacherPlan | None:
    """Return what is predicted of a job's teacher workers; None without any.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model and of its teacher.
        plan: the plan of its training workers.
    """
    if demand.teacher_workers is None:
        return None
    return TeacherPlan(
        demand.teacher_workers,
        worker_bytes=worker_bytes(demand, shape),
        offered_bytes=offered(plan.machine, not demand.on_gpu),
        batch_seconds=batch_seconds(demand, shape, plan.machine),
        train_seconds=plan.chosen.seconds,
    )


def check_teacher_workers(demand: Demand, shape: ModelShape, machine: Machine) -> None:
    """Raise InputError unless a teacher worker fits the memory of a worker, or the job says that it need not."""
    if problem := memory_problem(demand, shape, machine):
        hint = (
            "take workers with more memory, or set distill.logits.source to stored, which shards the teacher"
        )
        raise InputError(problem, "distill.workers", f"{hint}; must_fit: false runs it all the same")


def memory_problem(demand: Demand, shape: ModelShape, machine: Machine) -> str:
    """Return why a teacher worker does not fit the memory of a worker; empty if it does, or need not."""
    if demand.teacher_workers is None or not demand.resources.must_fit:
        return ""
    return too_large("teacher", worker_bytes(demand, shape), demand, machine)


def worker_bytes(demand: Demand, shape: ModelShape) -> float:
    """Return the bytes of a teacher worker: the teacher in fp32, and what a pass holds."""
    return whole_teacher_bytes(demand, shape) + (0.0 if demand.on_gpu else PROCESS)


def batch_seconds(demand: Demand, shape: ModelShape, machine: Machine) -> float:
    """Return the seconds in which one teacher worker computes the logits of a global batch."""
    teacher = shape.teacher
    assert teacher is not None
    program = dataclasses.replace(demand.program, in_8_bits=0, dropout=False, compiled=False, reference=False)
    rows = rows_of_pass(demand.batch, demand.shards, shape.sequence_length)
    predicted = max(round(teacher.head_share * shape.sequence_length), 1)
    return demand.batch / rows * pass_seconds(teacher, machine, program, rows, predicted)

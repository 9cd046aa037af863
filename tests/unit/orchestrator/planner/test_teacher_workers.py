"""What is predicted of teacher workers: their memory, and whether they keep up with the student."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.observe.formatting import duration
from orchestrator.observe.pages.page import size
from orchestrator.parallel.config import ParallelSpec
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import plan, predict
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.planner.memory import peak_bytes
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.teacher_workers import (
    TeacherPlan,
    batch_seconds,
    check_teacher_workers,
    plan_teacher_workers,
    worker_bytes,
)
from workloads.describe import describe

LENGTH = 1024


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    student, teacher = (model_shape(describe(name), LENGTH) for name in ("llama-3.2-1b", "llama-3-8b"))
    return dataclasses.replace(student, teacher=teacher, teacher_runs=False)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load("h100").machine("bf16")


def demand(workers: Any, must_fit: bool = True, batch: int = 512, ranks: int = 2) -> Demand:
    distill = {"teacher": "t", "logits": {"source": "workers"}, "workers": workers} if workers else None
    return demand_of(parse({
        "name": "taught",
        "workload": {"model": "llama-3.2-1b"},
        "data": {"sources": [{"uri": "a"}], "tokenizer": "t", "sequence_length": LENGTH},
        "train": {"steps": 10, "global_batch": batch, "precision": "bf16"},
        "distill": distill,
        "resources": {"workers": ranks, "per_worker": {"gpu": 1}, "must_fit": must_fit},
    }))  # fmt: skip


def predicted(shape: ModelShape, machine: Machine, workers: Any) -> TeacherPlan:
    asked = demand(workers)
    found = plan_teacher_workers(asked, shape, plan(asked, shape, 2, machine))
    assert found is not None
    return found


def test_a_teacher_worker_needs_the_teacher_in_fp32_and_a_pass_of_it(
    shape: ModelShape, machine: Machine
) -> None:
    assert shape.teacher is not None
    needed = worker_bytes(demand(1), shape)
    logits = 3 * 4.0 * 4096 * shape.vocabulary
    assert needed == pytest.approx(4.0 * shape.teacher.parameters + logits)
    assert needed == worker_bytes(demand(1, batch=1024), shape)  # a pass has 4,096 tokens
    larger = dataclasses.replace(shape, teacher=dataclasses.replace(shape.teacher, parameters=30e9))
    with pytest.raises(InputError, match=r"a teacher worker needs 12\d.\d GB, and a worker offers") as error:
        check_teacher_workers(demand(1), larger, machine)
    assert "distill.logits.source to stored, which shards the teacher" in str(error.value)
    check_teacher_workers(demand(1, must_fit=False), larger, machine)
    check_teacher_workers(demand(None), larger, machine)


def test_steps_wait_for_teacher_workers_that_are_too_few(shape: ModelShape, machine: Machine) -> None:
    one, eight = (predicted(shape, machine, workers) for workers in (1, 8))
    assert shape.teacher is not None
    assert one.batch_seconds == eight.batch_seconds
    # Two operations a parameter and token, at no more than the peak of an H100 and no less than a fifth of it.
    operations = 2.0 * shape.teacher.parameters * LENGTH * 512
    assert operations / 989e12 < batch_seconds(demand(1), shape, machine) < 5 * operations / 989e12
    assert one.step_seconds == one.batch_seconds > one.train_seconds
    assert eight.step_seconds == max(eight.train_seconds, one.batch_seconds / 8)
    assert plan_teacher_workers(demand(None), shape, plan(demand(None), shape, 2, machine)) is None


def test_the_plan_says_so_in_words(shape: ModelShape, machine: Machine) -> None:
    lines = predicted(shape, machine, {"min": 0, "max": 2}).text(size, duration)
    assert lines[0].startswith("A teacher worker needs 3")
    assert lines[1].startswith("2 teacher workers need ")
    assert "for the logits of a step, which takes" in lines[1]
    assert lines[2].startswith(
        "Without room for one, each training worker holds the teacher before the first"
    )
    assert len(predicted(shape, machine, 1).text(size, duration)) == 2
    assert predicted(shape, machine, 1).to_json()["workers"] == 1


def test_ranks_that_divide_a_teacher_hold_less_and_gather_it(shape: ModelShape, machine: Machine) -> None:
    """A teacher of 70 billion parameters fits beside no student, and divided among 64 ranks beside each."""
    teacher = model_shape(describe("llama-3-70b"), LENGTH)
    whole = dataclasses.replace(shape, teacher=teacher, teacher_runs=True)
    divided = dataclasses.replace(whole, teacher_sharded=True)
    asked = demand(None, ranks=64)
    layout = Layout(dp=64, zero=1)
    held = [peak_bytes(asked, each, layout) for each in (whole, divided)]
    assert held[0] - held[1] == pytest.approx(4 * teacher.parameters * 63 / 64)
    times = [predict(asked, each, layout, machine).time for each in (whole, divided)]
    assert times[0].compute == times[1].compute
    assert times[1].communication > times[0].communication
    with pytest.raises(InputError) as refused:
        plan(dataclasses.replace(asked, parallel=ParallelSpec(zero=1, tp=1, pp=1)), whole, 64, machine)
    assert refused.value.hint.endswith(
        "; or set distill.shard to true, so that the data-parallel ranks divide the teacher's weights"
    )
    chosen = plan(dataclasses.replace(asked, parallel=ParallelSpec(zero=1, tp=1, pp=1)), divided, 64, machine)
    assert chosen.chosen.layout.dp == 64

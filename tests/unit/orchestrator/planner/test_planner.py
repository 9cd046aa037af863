"""The plan follows the objective of the job: time, or cost within the hours that there are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.config.spec import JobSpec, parse
from orchestrator.planner.choose_layout import Plan, plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import load
from orchestrator.planner.planner import Planner, faster_on_fewer, planned, with_worker_range, worker_counts
from orchestrator.planner.search import TIE
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe

SHAPE = model_shape(describe("llama-3.2-1b"), 2048)
MACHINE = load("h100").machine("bf16")


def job(objective: str, least: int = 1, **limits: Any) -> JobSpec:
    document: dict[str, Any] = {
        "name": "objective",
        "workload": {"model": "llama-3.2-1b"},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 2048},
        "parallel": {"zero": 1},
        "train": {"steps": 1000, "global_batch": 64, "precision": "bf16"},
        "resources": {
            "workers": {"min": least, "max": 32},
            "per_worker": {"gpu": 1},
            "objective": objective,
        },
        "limits": limits,
    }
    return parse(document)


def cost(found: Plan) -> float:
    return found.chosen.seconds * found.chosen.layout.world


def test_time_takes_the_fastest_and_cost_the_cheapest() -> None:
    fast, cheap = (planned(demand_of(job(name)), SHAPE, 32, MACHINE) for name in ("time", "cost"))
    assert fast.chosen == plan(demand_of(job("time")), SHAPE, 32, MACHINE).chosen
    assert cheap.chosen.layout.world < fast.chosen.layout.world
    assert (
        planned(
            demand_of(
                (asked := job("cost")).with_parts(resources=with_worker_range(asked.resources, 32, 32))
            ),
            SHAPE,
            32,
            MACHINE,
        ).chosen.layout.world
        == 32
    )  # as Ray Train starts them
    each = [plan(demand_of(job("time")), SHAPE, width, MACHINE) for width in worker_counts(1, 32)]
    assert cost(cheap) <= min(map(cost, each)) * (1 + TIE)
    as_cheap = [found for found in each if cost(found) <= min(map(cost, each)) * (1 + TIE)]
    assert cheap.chosen.seconds == min(found.chosen.seconds for found in as_cheap)


def tiny(least: int = 1, most: int = 8, **parallel: Any) -> JobSpec:
    return parse(
        {
            "name": "tiny",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 64},
            "parallel": parallel or "auto",
            "train": {"steps": 1000, "global_batch": 8},
            "resources": {"workers": {"min": least, "max": most}},
        }
    )


def test_fewer_workers_are_named_where_all_would_mostly_wait() -> None:
    shape = model_shape(describe("gpt-tiny", {"hidden": 64, "layers": 2}), 64)
    slow = dataclasses.replace(load("cpu-core").machine("fp32"), collective=0.05)
    found = planned(demand_of(tiny()), shape, 8, slow)
    assert found.chosen.layout.world == 8
    fewer = faster_on_fewer(demand_of(tiny()), shape, found)
    assert fewer is not None
    assert (fewer.chosen.layout.world, fewer.chosen.seconds * (1 + TIE) < found.chosen.seconds) == (1, True)
    # no fewer than the job wants, and none where it gives the layout itself
    assert (
        faster_on_fewer(
            demand_of((asked := tiny()).with_parts(resources=with_worker_range(asked.resources, 8, 8))),
            shape,
            found,
        )
        is None
    )
    assert faster_on_fewer(demand_of(tiny(tp=1)), shape, found) is None


def test_fewer_workers_are_not_named_where_they_are_slower() -> None:
    shape, core = (
        model_shape(describe("gpt-tiny", {"hidden": 512, "layers": 4}), 64),
        load("cpu-core").machine("fp32"),
    )
    assert faster_on_fewer(demand_of(tiny()), shape, planned(demand_of(tiny()), shape, 2, core)) is None


def test_cost_keeps_to_the_hours_and_to_the_least_workers() -> None:
    cheap = planned(demand_of(job("cost")), SHAPE, 32, MACHINE).chosen
    hours = 1000 * cheap.seconds / 3600
    hurried = planned(demand_of(job("cost", hours=0.4 * hours)), SHAPE, 32, MACHINE).chosen
    assert 1000 * hurried.seconds / 3600 <= 0.4 * hours
    assert cheap.layout.world < hurried.layout.world < 32
    hopeless = planned(demand_of(job("cost", hours=1e-6)), SHAPE, 32, MACHINE).chosen
    assert hopeless == planned(demand_of(job("time")), SHAPE, 32, MACHINE).chosen
    assert planned(demand_of(job("cost", 16)), SHAPE, 32, MACHINE).chosen.layout.world >= 16


def test_the_controller_takes_no_more_workers_than_the_objective_wants() -> None:
    wanted = Planner(demand_of(job("cost")), SHAPE, MACHINE).choose(32)
    assert wanted == planned(demand_of(job("cost")), SHAPE, 32, MACHINE).chosen.layout


@pytest.mark.parametrize(
    ("least", "most", "found"), [(1, 8, [1, 2, 4, 8]), (3, 10, [3, 6, 10]), (4, 4, [4]), (8, 4, [4])]
)
def test_widths_double_from_the_least_to_the_most(least: int, most: int, found: list[int]) -> None:
    assert worker_counts(least, most) == found


def test_what_a_worker_can_do_is_told_in_its_fastest_precision() -> None:
    """By which `mfu` is: a processor may be slower in 16 bits than in 32."""
    spec = job("time")
    assert Planner(demand_of(spec), SHAPE, MACHINE).flops["peak_flops"] == MACHINE.flops
    slow = dataclasses.replace(MACHINE, flops=0.04 * MACHINE.full_flops)
    assert Planner(demand_of(spec), SHAPE, slow).flops["peak_flops"] == MACHINE.full_flops

"""Host memory of a run with GPUs."""

from __future__ import annotations

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import BOUNDLESS
from orchestrator.planner.host_memory import check_host_memory, check_workers_memory, state_bytes
from orchestrator.planner.planner import Planner

PINNED = parse(job("none.txt") | {"parallel": {"tp": 4, "pp": 1, "micro_batch": 1}}).parallel
SHAPE = ModelShape(70_000_000_000, 80, 8192, 64, 8, 28672, 128256, 8192)


def spec(gpu: int, **resources: object) -> JobSpec:
    return parse(job("none.txt") | {"resources": {"workers": 8, "per_worker": {"gpu": gpu}, **resources}})


def state_of(asked: JobSpec) -> tuple[ResourceSpec, float]:
    """The resources of a job, and the bytes of its state."""
    return asked.resources, state_bytes(asked.train.optimizer, asked.checkpoint.ema, SHAPE)


def test_the_state_of_70_billion_parameters() -> None:
    assert state_bytes((asked := spec(1)).train.optimizer, asked.checkpoint.ema, SHAPE) == 840e9


def test_a_machine_that_cannot_hold_two_copies_is_refused() -> None:
    with pytest.raises(InputError, match="1680 GB of host memory, but this machine has 1000 GB"):
        check_host_memory(*state_of(spec(1)), 1e12)
    check_host_memory(*state_of(spec(1)), 2e12)
    check_host_memory(*state_of(spec(0)), 1e12)
    check_host_memory(*state_of(spec(1, must_fit=False)), 1e12)


def test_workers_of_a_cluster_that_cannot_hold_their_part_are_refused() -> None:
    with pytest.raises(
        InputError, match="210 GB of host memory for each of 8 workers, but the smallest node has 200"
    ):
        check_workers_memory(*state_of(spec(1)), 2e11)
    for asked, there in ((spec(1), 2.2e11), (spec(0), 1e11), (spec(1, must_fit=False), 1e11)):
        check_workers_memory(*state_of(asked), there)


def test_a_gang_that_is_too_narrow_for_its_state_is_not_chosen() -> None:
    asked = spec(1, workers={"min": 1, "max": 8})
    planner = Planner(demand_of(asked), SHAPE, BOUNDLESS, 5e11)
    assert planner.choose(4)
    assert planner.choose(2) is None
    assert Planner(demand_of(asked), SHAPE, BOUNDLESS).choose(2)
    pinned = asked.model_copy(update={"parallel": PINNED})
    found = Planner(demand_of(pinned), SHAPE, BOUNDLESS).choose(7)
    assert found is not None
    assert found.world == 4
    assert (
        Planner(demand_of(pinned), SHAPE, BOUNDLESS, 2.5e11).choose(7) is None
    )  # 7 would have room, and 4 have not

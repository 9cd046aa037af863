"""Host memory of a run with GPUs."""

from __future__ import annotations

import pytest
from jobs import job

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, parse
from orchestrator.planning.host_memory import check_host_memory, state_bytes
from orchestrator.planning.layout import ModelShape

SHAPE = ModelShape(70_000_000_000, 80, 8192, 64, 8, 28672, 128256, 8192)


def spec(gpu: int) -> JobSpec:
    return parse(job("none.txt") | {"resources": {"workers": 8, "per_worker": {"gpu": gpu}}})


def test_the_state_of_70_billion_parameters() -> None:
    assert state_bytes(spec(1), SHAPE) == 840e9


def test_a_machine_that_cannot_hold_two_copies_is_refused() -> None:
    with pytest.raises(InputError, match="1680 GB of host memory, and this machine has 1000 GB"):
        check_host_memory(spec(1), SHAPE, 1e12)
    check_host_memory(spec(1), SHAPE, 2e12)
    check_host_memory(spec(0), SHAPE, 1e12)

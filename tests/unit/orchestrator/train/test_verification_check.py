"""What cannot be computed again by another rank is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.config import ParallelSpec
from orchestrator.train.verification_check import check_verification


def workload(objective: str = "causal_lm", compares: bool = False) -> Any:
    return SimpleNamespace(objective=SimpleNamespace(name=objective), compares=compares)


def resources(workers: int, **verify: Any) -> ResourceSpec:
    return ResourceSpec.model_validate({"workers": workers, "verify": {"every": 5, **verify}})


def test_replicas_are_needed_and_told_from_the_layout() -> None:
    check_verification(resources(2), "auto", workload())
    check_verification(resources(8), ParallelSpec(tp=2, ep=2), workload())
    with pytest.raises(InputError, match="4 workers with tp 2, pp 2 have one replica"):
        check_verification(resources(4), ParallelSpec(tp=2, pp=2), workload())
    with pytest.raises(InputError, match="1 workers have one replica"):
        check_verification(resources(1), "auto", workload())
    check_verification(resources(1, by="same"), "auto", workload())
    check_verification(ResourceSpec(), "auto", workload())


@pytest.mark.parametrize(("objective", "compares"), [("grpo", False), ("kto", False), ("clip", True)])
def test_samples_that_depend_on_the_rank_cannot_move(objective: str, compares: bool) -> None:
    with pytest.raises(InputError, match=f"no other rank can compute a step of {objective} again"):
        check_verification(resources(4), "auto", workload(objective, compares))
    check_verification(resources(4, by="same"), "auto", workload(objective, compares))

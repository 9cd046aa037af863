"""Traced memory beside that of real ranks: tensors by the same counting, of random small jobs under random layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from harness import TOGETHER, finished
from lasting_gang import LastingGang
from traced_cases import case_of, job_of, trace, workload_of

from orchestrator.parallel.layout import Layout
from orchestrator.planner.step_trace import StepTrace

MOST = 0.05
"""What a trace may be off by at the 95th percentile."""


def errors(cases: Sequence[dict[str, Any]], gang: LastingGang) -> list[float]:
    """What the trace of the first and of the last rank of each case is off by, as a share of what was measured."""
    found = []
    for world in sorted({Layout(**case["layout"]).world for case in cases}):
        alike = [case for case in cases if Layout(**case["layout"]).world == world]
        for at in range(0, len(alike), TOGETHER):
            some = alike[at : at + TOGETHER]
            ranks = finished(world, {"cases": some}, "rank_measured:main", gang)
            for number, case in enumerate(some):
                for rank in sorted({0, world - 1}):
                    traced = trace(job_of(case), workload_of(case), Layout(**case["layout"]), rank)
                    assert isinstance(traced, StepTrace), (case, traced)
                    measured = ranks[rank][number]["peak"]
                    found.append(traced.memory.peak / measured - 1.0)
                    if abs(found[-1]) > MOST:
                        print(case["seed"], rank, case["layout"], f"{found[-1]:+.1%}", traced.memory)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "world"),
    [(1005, 2), (154, None)],  # its peak is where gloo reduces a copy
)
def test_the_tensors_of_real_ranks_are_those_of_the_trace(
    seed: int, world: int | None, gang: LastingGang
) -> None:
    assert max(map(abs, errors([case_of(seed, world)], gang))) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_jobs_under_random_layouts(first: int, gang: LastingGang) -> None:
    """Twenty at a time; two hundred in all."""
    found = sorted(map(abs, errors([case_of(seed) for seed in range(first, first + 20)], gang)))
    print(f"{len(found)} ranks, {sum(e == 0.0 for e in found)} to the byte, largest error {found[-1]:.2%}")
    assert found[int(0.95 * len(found))] < MOST

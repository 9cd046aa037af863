"""What data-parallel traffic adds to a step."""

from __future__ import annotations

import pytest

from orchestrator.parallel.layout import Layout
from orchestrator.planner.device_profile import load
from orchestrator.planner.simulation.operators import Program
from orchestrator.planner.simulation.step import data_parallel


def test_weights_are_gathered_once_under_zero_2_and_in_a_pipeline() -> None:
    """As the engine does: under ZeRO 3 twice for each micro-batch, where nothing hides it."""
    machine = load("h100").machine("bf16")

    def sent(zero: int, pp: int, parts: int) -> float:
        layout = Layout(dp=8, pp=pp, zero=zero)
        return data_parallel(layout, 1e9, 1e9, 0.0, parts, machine, Program(), 0.0, 0.0, 1, 8)

    gather = sent(3, 1, 1) - sent(2, 1, 1)
    assert gather > 0.0
    assert sent(3, 1, 5) - sent(2, 1, 5) == pytest.approx((5 * 2 - 1) * gather)
    for zero in (2, 3):
        assert sent(zero, 2, 5) == sent(zero, 2, 1) == pytest.approx(sent(2, 1, 1), rel=0.2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_are_summed_over_the_ranks_that_have_the_same_ones(zero: int) -> None:
    """Over none where each replica has its own; as all others without expert parallelism."""
    machine = load("h100").machine("bf16")

    def sent(parameters: float, experts: float, ep: int, dp: int = 8) -> float:
        layout = Layout(dp=dp, ep=ep, zero=zero)
        return data_parallel(
            layout, parameters, parameters, experts, 1, machine, Program(), 0.0, 0.0, 1, 1000
        )

    assert sent(8e9, 0.75, 8) == pytest.approx(sent(2e9, 0.0, 1))
    assert sent(8e9, 0.75, 1) == sent(8e9, 0.0, 1)
    # of one model, on two nodes: pairs far apart sum an eighth of the experts
    assert sent(8e9, 0.75, 1, 16) > sent(2.75e9, 0.75 / 2.75, 8, 16) > sent(2e9, 0.0, 1, 16)

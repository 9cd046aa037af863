"""What data-parallel traffic adds to a step."""

from __future__ import annotations

import pytest

from orchestrator.planning.layout import Layout
from orchestrator.planning.profile import load
from orchestrator.planning.simulation.data_parallel import data_parallel
from orchestrator.planning.simulation.operators import Program


def test_weights_are_gathered_once_under_zero_2_and_in_a_pipeline() -> None:
    """As the engine does: under ZeRO 3 twice for each micro-batch, where nothing hides it."""
    machine = load("h100").machine("bf16")

    def sent(zero: int, pp: int, parts: int) -> float:
        layout = Layout(dp=8, pp=pp, zero=zero)
        return data_parallel(layout, 1e9, 1e9, parts, machine, Program(), 0.0, 0.0, 1, 8)

    gather = sent(3, 1, 1) - sent(2, 1, 1)
    assert gather > 0.0
    assert sent(3, 1, 5) - sent(2, 1, 5) == pytest.approx((5 * 2 - 1) * gather)
    for zero in (2, 3):
        assert sent(zero, 2, 5) == sent(zero, 2, 1) == pytest.approx(sent(2, 1, 1), rel=0.2)

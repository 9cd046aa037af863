"""How late the last rank is, against drawn delays."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.simulation.step import MAX_SUMMED_RANKS, mean_last_delay, quantile_last_delay


@pytest.mark.parametrize("ranks", [1, 2, 8, 100, 1000])
def test_the_last_is_as_late_as_drawn_ones_are(ranks: int) -> None:
    drawn = np.random.default_rng(0).exponential(size=(20_000, ranks)).max(axis=1)
    assert mean_last_delay(ranks) == pytest.approx(drawn.mean(), rel=0.02)
    for share in (0.05, 0.5, 0.95):
        assert quantile_last_delay(ranks, share) == pytest.approx(
            np.quantile(drawn, share), rel=0.05, abs=0.01
        )


def test_the_series_goes_on_where_the_sum_ends() -> None:
    assert mean_last_delay(MAX_SUMMED_RANKS + 1) - mean_last_delay(MAX_SUMMED_RANKS) == pytest.approx(
        1 / (MAX_SUMMED_RANKS + 1), rel=1e-4
    )
    assert mean_last_delay(100_000) == pytest.approx(sum(1 / n for n in range(1, 100_001)), rel=1e-9)

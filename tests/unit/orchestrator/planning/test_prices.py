"""What machines cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.job.errors import InputError
from orchestrator.planning.prices import TABLE, by_zone, load, near, rate

SPOT = {"machine": "g5.xlarge", "market": "spot", "zone": "us-west-2a"}
HEADER = "machine,market,zone,usd_per_hour\n"


def test_our_table_says_what_it_is_and_has_all_that_render_starts_with() -> None:
    from cluster.render.launcher import PLACES

    prices = load()
    assert "Dated 20" in TABLE.read_text()
    for place in PLACES.values():
        assert (place.head_machine, "on-demand", "") in prices
        assert {m for name, m, _ in prices if name == place.worker_machine} == {"on-demand", "spot"}
    for (machine, market, zone), usd in prices.items():
        if market == "spot":
            assert usd < prices[machine, "on-demand", zone]


def test_a_zone_s_own_price_comes_before_that_of_any_zone(tmp_path: Path) -> None:
    table = tmp_path / "prices.csv"
    table.write_text("# mine\n" + HEADER + "g5.xlarge,spot,us-west-2a,0.5\ng5.xlarge,spot,,0.25\n")
    prices = load(str(table))
    assert rate([SPOT, {**SPOT, "zone": "us-west-2b"}], prices) == 0.75


def test_one_unknown_machine_leaves_the_price_unknown() -> None:
    assert rate([SPOT, {**SPOT, "machine": "unheard-of"}], load()) is None
    assert rate([], load()) is None


def test_nodes_and_price_by_zone_and_market() -> None:
    prices = {("g5.xlarge", "spot", ""): 0.5, ("g5.xlarge", "on-demand", ""): 1.0}
    other, unknown = {**SPOT, "zone": "us-west-2b"}, {**SPOT, "market": "on-demand", "machine": "unheard-of"}
    assert by_zone([SPOT, other, unknown, SPOT], prices) == [
        {"zone": "us-west-2a", "market": "on-demand", "nodes": 1, "usd_per_hour": None},
        {"zone": "us-west-2a", "market": "spot", "nodes": 2, "usd_per_hour": 1.0},
        {"zone": "us-west-2b", "market": "spot", "nodes": 1, "usd_per_hour": 0.5},
    ]
    assert by_zone([], prices) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "machine,usd\na,1\n",
        HEADER + "a,spot,,free\n",
        HEADER + "a,spot,,-1\n",
        HEADER + "a,spot\n",
        HEADER + "a,spot,,nan\n",
    ],
)
def test_what_is_no_table_is_one_line(tmp_path: Path, text: str) -> None:
    table = tmp_path / "prices.csv"
    table.write_text(text)
    with pytest.raises(InputError, match="is no table of prices"):
        load(str(table))
    with pytest.raises(InputError, match="is no table of prices"):
        load(str(tmp_path / "nowhere.csv"))


def test_a_ceiling_that_comes_near_is_told_once() -> None:
    limits = {"hours": 10.0, "cost_usd": None}
    assert near(limits, {"hours": 7.99, "cost_usd": 1e9}, []) == []
    (line,) = near(limits, {"hours": 8.0, "cost_usd": 0.0}, [])
    assert line == "80% of limits.hours 10 are reached: 8"
    assert near(limits, {"hours": 9.0, "cost_usd": 0.0}, ["begun", line]) == []

"""What machines cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.planner.prices import by_zone, check, load, nearly_reached, rate

SPOT = {"machine": "g5.xlarge", "market": "spot", "zone": "us-west-2a"}
HEADER = "machine,market,zone,usd_per_hour\n"
PRICES = {("g5.xlarge", "spot", ""): 0.5, ("g5.xlarge", "on-demand", ""): 1.0}


def job(limits: dict[str, Any], tune: dict[str, Any] | None = None) -> JobSpec:
    document = {
        "name": "small",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 9, "global_batch": 8},
        "limits": limits,
    }
    search = {"space": {"train.optimizer.lr": {"uniform": [0.1, 0.2]}}, "trials": 2, "limits": tune}
    return parse(document | ({"tune": search} if tune else {}))


def test_a_ceiling_without_a_price_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^limits.cost_usd: this limit needs a price.*limits.usd_per_worker_hour"
    ):
        check((asked := job({"cost_usd": 5.0})).limits, asked.tune)
    with pytest.raises(InputError, match=r"^tune.limits.cost_usd: this limit needs a price"):
        check((asked := job({}, {"cost_usd": 5.0})).limits, asked.tune)
    check((asked := job({"hours": 5.0})).limits, asked.tune)
    check(
        (asked := job({"cost_usd": 5.0, "usd_per_worker_hour": 1.0}, {"cost_usd": 5.0})).limits,
        asked.tune,
    )
    table = tmp_path / "prices.csv"
    table.write_text(HEADER + "g5.xlarge,spot,,0.25\n")
    check((asked := job({"cost_usd": 5.0, "prices": str(table)})).limits, asked.tune)


def test_a_zone_s_own_price_comes_before_that_of_any_zone(tmp_path: Path) -> None:
    table = tmp_path / "prices.csv"
    table.write_text("# mine\n" + HEADER + "g5.xlarge,spot,us-west-2a,0.5\ng5.xlarge,spot,,0.25\n")
    prices = load(str(table))
    assert rate([SPOT, {**SPOT, "zone": "us-west-2b"}], prices) == 0.75


def test_one_unknown_machine_leaves_the_price_unknown() -> None:
    assert rate([SPOT, {**SPOT, "machine": "unheard-of"}], PRICES) is None
    assert rate([], PRICES) is None
    assert rate([SPOT], load(None)) is None


def test_nodes_and_price_by_zone_and_market() -> None:
    other, unknown = {**SPOT, "zone": "us-west-2b"}, {**SPOT, "market": "on-demand", "machine": "unheard-of"}
    assert by_zone([SPOT, other, unknown, SPOT], PRICES) == [
        {"zone": "us-west-2a", "market": "on-demand", "nodes": 1, "usd_per_hour": None},
        {"zone": "us-west-2a", "market": "spot", "nodes": 2, "usd_per_hour": 1.0},
        {"zone": "us-west-2b", "market": "spot", "nodes": 1, "usd_per_hour": 0.5},
    ]
    assert by_zone([], PRICES) == []


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
    with pytest.raises(InputError, match="is not a table of prices"):
        load(str(table))
    with pytest.raises(InputError, match="is not a table of prices"):
        load(str(tmp_path / "nowhere.csv"))


def test_a_ceiling_that_comes_near_is_told_once() -> None:
    limits = {"hours": 10.0, "cost_usd": None}
    assert nearly_reached(limits, {"hours": 7.99, "cost_usd": 1e9}, set()) == []
    (ceiling,) = nearly_reached(limits, {"hours": 8.0, "cost_usd": 0.0}, set())
    assert (ceiling.key, ceiling.limit, ceiling.spent) == ("hours", 10.0, 8.0)
    assert str(ceiling) == "80% of limits.hours (10) is reached: 8 is spent"
    assert nearly_reached(limits, {"hours": 9.0, "cost_usd": 0.0}, {("hours", 10.0)}) == []

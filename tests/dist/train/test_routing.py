"""Router statistics are the same numbers under every layout, recomputation included."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MODELS, Results, check_routers

MOE = {"name": "moe", **MODELS["moe"], "steps": 3}
TIGHT = {"changes": {**MODELS["moe"]["changes"], "moe": {"experts": 4, "intermediate": 32, "capacity_factor": 0.8}}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "dp": {"dp": 2, "zero": 1},
    "pp": {"pp": 2, "schedule": "interleaved"},
    "tp": {"tp": 2, "sequence": True},
    "cp": {"cp": 2},
    "recompute": {"dp": 2, "recompute": "full"},
}


def case(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    return {**MOE, **TIGHT, "id": f"routing-{name}", "layout": {"micro_batch": 2, **layout}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = Results(tmp_path_factory.mktemp("routing"))
    found.run(1, [case("alone", {})])
    found.run(2, [case(*item) for item in LAYOUTS.items()])
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_routers_are_judged_over_all_ranks(results: Results, name: str) -> None:
    alone = results.of(case("alone", {}))["extras"]
    check_routers(results.of(case(name, LAYOUTS[name]))["extras"], alone)
    for extra in alone:
        assert 1.0 < extra["router_load"] <= 4.0
        assert 0.0 < extra["router_dropped"] < 0.5
        assert 0.0 < extra["router_entropy"] < 1.39

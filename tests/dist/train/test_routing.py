"""Routers do, and say of themselves, the same under every layout, padding and recomputation included."""

from __future__ import annotations

from typing import Any

import pytest
from harness import APART, MODELS, Results, check_equal, check_routers

from cluster.workers.process_gang import ProcessGang

MOE = {"name": "moe", **MODELS["moe"], "steps": 3}
TIGHT = {
    "changes": {**MODELS["moe"]["changes"], "moe": {"experts": 4, "intermediate": 32, "capacity_factor": 0.8}}
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "dp": {"dp": 2, "zero": 1},
    "pp": {"pp": 2, "schedule": "interleaved"},
    "tp": {"tp": 2, "sequence": True},
    "cp": {"cp": 2},
    "recompute": {"dp": 2, "recompute": "full"},
}


BALANCED = {"experts": 4, "top_k": 2, "intermediate": 32, "auxiliary": 0.1, "z_loss": 0.01, "bias_rate": 0.01}
PADDED: dict[str, dict[str, Any]] = {
    "dropless": {
        "model": "mixtral-tiny",
        "changes": {"kv_heads": 2, "moe": {**BALANCED, "shared": 1}, **APART},
    },
    "tight": {
        "model": "roberta-tiny",
        "objective": "masked_lm",
        "changes": {"moe": {**BALANCED, "capacity_factor": 0.8}, **APART},
    },
    "pair": MODELS["pair-moe"],
}
"""Models with experts, on batches with padding."""
CASES = [
    ("dropless", "ep"),
    ("dropless", "pp"),
    ("tight", "tp"),
    ("tight", "cp"),
    ("tight", "recompute"),
    ("pair", "ep"),
]
LATER = [
    *((model, name) for model in ("dropless", "tight") for name in LAYOUTS if (model, name) not in CASES),
    *(("pair", name) for name in ("dp", "pp", "recompute")),
]
JUDGED = ("ep", "cp")
"""Where capacity is judged in the default suite without padding; `tight` is judged in the cases above."""


def case(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    return {**MOE, **TIGHT, "id": f"routing-{name}", "layout": {"micro_batch": 2, **layout}}


def padded(model: str, name: str) -> dict[str, Any]:
    layout = {"micro_batch": 2, **LAYOUTS.get(name, {})}
    return {**PADDED[model], "steps": 3, "ragged": True, "id": f"padded-{model}-{name}", "layout": layout}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    found = Results(tmp_path_factory.mktemp("routing"), gang)
    found.run(1, [case("alone", {}), *(padded(model, "alone") for model in PADDED)])
    found.run(2, [case(name, LAYOUTS[name]) for name in JUDGED])
    found.run(2, [padded(*item) for item in CASES])
    return found


@pytest.mark.parametrize(
    ("model", "name"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)]
)
def test_padding_is_no_token_under_any_layout(results: Results, model: str, name: str) -> None:
    results.run(2, [padded(model, name)])
    check_equal(results.of(padded(model, name)), results.of(padded(model, "alone")))


@pytest.mark.parametrize(
    "name", [n if n in JUDGED else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_routers_are_judged_over_all_ranks(results: Results, name: str) -> None:
    results.run(2, [case(name, LAYOUTS[name])])
    alone = results.of(case("alone", {}))["extras"]
    check_routers(results.of(case(name, LAYOUTS[name]))["extras"], alone)
    for extra in alone:
        assert 1.0 < extra["router_load"] <= 4.0
        assert 0.0 < extra["router_dropped"] < 0.5
        assert 0.0 < extra["router_entropy"] < 1.39

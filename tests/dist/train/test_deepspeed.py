"""The DeepSpeed engine trains what the torch engine and one process train."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MODELS, Results, check_equal, reference_of

WAYS: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"zero": 2, "offload": "optimizer"},
    {"zero": 3, "offload": "parameters"},
]
STEPS = 3


def name_of(way: dict[str, Any]) -> str:
    return " ".join([f"zero{way['zero']}", *(f"offload-{way['offload']}" for _ in way if _ == "offload")])


def case(model: str, world: int, way: dict[str, Any], micro: int = 2, **fields: Any) -> dict[str, Any]:
    layout = {"engine": "deepspeed", "dp": world, "micro_batch": micro, **way}
    named = {"name": f"{model}{''.join(f' {k}' for k in fields)}", "id": f"{model} {world} {name_of(way)} {micro} {fields}"}
    named["id"] = "".join(c if c.isalnum() or c in " -" else "_" for c in named["id"])
    return {**MODELS[model], **fields, **named, "steps": STEPS, "layout": layout}


QUICK = {
    world: [case("decoder", world, way) for way in WAYS]
    for world in (1, 2)
}
QUICK[2] += [case("decoder", 2, {"zero": 3}, micro=1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("deepspeed"))


def check(results: Results, world: int, one: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    alone = {r["id"]: r for r in map(reference_of, cases)}
    results.run(1, list(alone.values()), 280)
    results.run(world, cases, 280)
    check_equal(results.of(one), results.of(reference_of(one)))


@pytest.mark.parametrize(("world", "one"), [(w, c) for w in QUICK for c in QUICK[w]], ids=lambda v: v["id"] if isinstance(v, dict) else "")
def test_every_stage_trains_what_one_process_trains(results: Results, world: int, one: dict[str, Any]) -> None:
    check(results, world, one, QUICK[world])

"""Muon, rates by layer and name and smoothed labels under every feature of a layout, and a run that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MODELS, Results, check_equal, cover, layouts_of, reference_of, same_bits

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

STEPS = 3
GROUPS = [{"match": ["*attention*"], "lr_scale": 2.0}, {"match": ["tokens.*"], "weight_decay": 0.0}]
MUON = {
    "steps": STEPS,
    "optimizer": {"name": "muon", "layer_decay": 0.8, "groups": GROUPS},
    "train": {"label_smoothing": 0.1},
}
FIRST = Layout(dp=2, zero=1)
THEN = (FIRST, Layout(tp=2, micro_batch=2), Layout(dp=2, zero=3))


def case(model: str, layout: Layout, **fields: Any) -> dict[str, Any]:
    name = f"{model} {layout} " + " ".join(map(str, fields.values()))
    return {**MODELS[model], **MUON, "name": model, "layout": layout.to_json(), "id": name, **fields}


def cases_of(model: str, world: int, size: int) -> list[dict[str, Any]]:
    return [case(model, layout) for layout in cover(layouts_of(model, world), size)]


CASES = {
    2: [found for model in ("decoder", "moe", "latent", "pair") for found in cases_of(model, 2, 1)],
    4: [
        *cases_of("decoder", 4, 2),
        *cases_of("moe", 4, 1),
        case("moe", Layout(dp=4, ep=2, zero=3, shard=2)),
    ],
}
LEG = case("decoder", FIRST, commit=True)
ON = [case("decoder", layout, restore=LEG["id"]) for layout in THEN]
WHOLE = {**LEG, "steps": 2 * STEPS, "id": "muon-whole", "commit": False}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return Results(tmp_path_factory.mktemp("muon"), gang)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", CASES)
def test_every_feature_of_a_layout_trains_what_one_process_trains(results: Results, world: int) -> None:
    """Asked for in Megatron-LM#5533."""
    results.run(1, list({found["id"]: found for found in map(reference_of, CASES[world])}.values()))
    results.run(world, CASES[world], 700)
    for found in CASES[world]:
        check_equal(results.of(found), results.of(reference_of(found)))


@pytest.mark.slow
def test_a_run_goes_on_under_any_layout_and_with_the_same_bits_under_its_own(results: Results) -> None:
    results.run(2, [LEG, WHOLE])
    results.run(2, ON)
    whole = results.of(WHOLE)
    for number, second in enumerate(ON):
        legs = [results.of(LEG), results.of(second)]
        joined = {name: legs[0][name] + legs[1][name] for name in ("losses", "averaged", "norms", "extras")}
        ends = {"first": legs[0]["first"], "state": legs[1]["state"], "eval": legs[1]["eval"]}
        check_equal(joined | ends, whole)
        if number == 0:
            same_bits(joined | ends, whole)

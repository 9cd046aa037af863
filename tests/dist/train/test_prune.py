"""Pruning under layouts: the same weights are chosen, and a run goes on with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import MODELS, Results, check_equal, cover, layouts_of, reference_of, same_bits

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

STEPS = 3
STILL = {"optimizer": {"clip": 1e-30, "weight_decay": 0.0}}
"""Gradients are scaled to nothing, so that weights and scores are the same bits under any layout."""
SHARE = {"sparsity": 0.6, "steps": [1, 1]}
LAYER = {"sparsity": 0.6, "scope": "layer", "steps": [1, 1]}
PATTERN = {"pattern": "2:4", "steps": [1, 1]}
MOVES = {"method": "movement", "sparsity": 0.6, "steps": [3, 4], "choose_every": 1}
MOVES_BY_PATTERN = {"method": "movement", "pattern": "2:4", "steps": [3, 4], "choose_every": 1}
GROWS = {"sparsity": 0.6, "steps": [1, 6], "choose_every": 2}


def case(model: str, layout: Layout, prune: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = " ".join(map(str, (*prune.values(), *fields.values())))
    fields = {"steps": STEPS, **fields}
    return {**MODELS[model], "name": f"{model} {named}", "layout": layout.to_json(), "prune": prune,
            "id": f"{model} {layout} {named}".replace("/", "-"), **fields}  # fmt: skip


def under(model: str, world: int, prune: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [case(model, layout, prune, **fields) for layout in cover(layouts_of(model, world), 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return Results(tmp_path_factory.mktemp("prune"), gang)


def pruned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masks, the scores and the weights that they are of."""
    masks = [name for name in state if name.endswith(".mask")]
    weights = [f"model.{name.removeprefix('prune.').removesuffix('.mask')}" for name in masks]
    return {name: state[name] for name in state if name.startswith("prune.") or name in weights}


def check_same_choice(results: Results, cases: list[dict[str, Any]]) -> None:
    """What is pruned in all cases is what one process prunes, bit by bit."""
    for each in cases:
        found, wanted = pruned(results.of(each)["state"]), pruned(results.of(reference_of(each))["state"])
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not found[name].equal(wanted[name])] == [], each["id"]
        assert (
            results.of(each)["extras"][-1]["sparsity"]
            == results.of(reference_of(each))["extras"][-1]["sparsity"]
        )
        masks = {name: tensor for name, tensor in found.items() if name.endswith(".mask")}
        share = sum(int((~mask).sum()) for mask in masks.values()) / sum(m.numel() for m in masks.values())
        assert share == pytest.approx(0.5 if "pattern" in each["prune"] else 0.6, abs=1e-3)
        for name, mask in masks.items():
            weight = found[f"model.{name.removeprefix('prune.').removesuffix('.mask')}"]
            assert mask.equal(weight != 0)


CHOICES = {
    2: [case("decoder", Layout(tp=2, micro_batch=2), PATTERN, **STILL),
        case("decoder", Layout(dp=2, zero=1), SHARE, **STILL)],
    4: [case("moe", Layout(dp=4, ep=2, zero=3, shard=2), LAYER, **STILL),
        case("moe", Layout(dp=2, tp=2, zero=1), PATTERN, **STILL)],
}  # fmt: skip
LATER = {
    2: [each for model in ("decoder", "moe", "pair", "encoder") for prune in (LAYER, PATTERN, SHARE)
        for each in under(model, 2, prune, **STILL)],
    4: [each for prune in (SHARE, PATTERN) for each in under("moe", 4, prune, **STILL)],
}  # fmt: skip


@pytest.mark.parametrize("world", CHOICES)
def test_the_same_weights_are_chosen_under_any_layout(results: Results, world: int) -> None:
    results.run_beside_one_process(world, CHOICES[world])
    check_same_choice(results, CHOICES[world])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", LATER)
def test_the_same_weights_are_chosen_under_every_feature_of_a_layout(results: Results, world: int) -> None:
    results.run_beside_one_process(world, LATER[world])
    check_same_choice(results, LATER[world])


@pytest.mark.slow
@pytest.mark.parametrize("prune", [MOVES, MOVES_BY_PATTERN])
def test_scores_of_movement_choose_the_same_weights_under_any_layout(
    results: Results, prune: dict[str, Any]
) -> None:
    """Scores are added up on one rank; others go on from its commit, where they change no more."""
    first = case("decoder", Layout(micro_batch=2), prune, commit=True)
    results.run(1, [first])
    layouts = [Layout(micro_batch=2), *cover(layouts_of("decoder", 2), 1)]
    on = [case("decoder", layout, prune, restore=first["id"], **STILL) for layout in layouts]
    results.run(1, on[:1])
    results.run(2, on[1:])
    wanted = pruned(results.of(on[0])["state"])
    assert any(bool((~tensor).any()) for name, tensor in wanted.items() if name.endswith(".mask"))
    assert any(bool(tensor.any()) for name, tensor in wanted.items() if name.endswith(".hidden"))
    for each in on[1:]:
        found = results.of(each)["state"]
        assert all(found[n].equal(wanted[n]) for n in wanted if n.startswith(("prune.", "model."))), each[
            "id"
        ]


@pytest.mark.parametrize(
    "prune",
    [pytest.param(GROWS, marks=pytest.mark.slow), {**MOVES, "steps": [1, 6]}],
    ids=["magnitude", "movement"],
)
def test_a_run_goes_on_with_the_same_bits_and_under_another_layout(
    results: Results, prune: dict[str, Any]
) -> None:
    layout = Layout(dp=2, zero=1)
    leg = case("decoder", layout, prune, commit=True)
    whole = case("decoder", layout, prune, steps=2 * STEPS)
    on = case("decoder", layout, prune, restore=leg["id"])
    resized = case("decoder", Layout(micro_batch=2), prune, restore=leg["id"])
    results.run(2, [leg, whole])
    results.run(2, [on])
    results.run(1, [resized])
    joined = {
        name: results.of(leg)[name] + results.of(on)[name]
        for name in ("losses", "averaged", "norms", "extras")
    }
    ends = {
        "first": results.of(leg)["first"],
        "state": results.of(on)["state"],
        "eval": results.of(on)["eval"],
    }
    same_bits(joined | ends, results.of(whole))
    assert joined["extras"] == results.of(whole)["extras"]
    for name, tensor in results.of(leg)["state"].items():
        assert torch.equal(results.of(resized)["first"][name], tensor), name


@pytest.mark.slow
def test_every_width_prunes_the_same_bits_under_bitwise_determinism(results: Results) -> None:
    fields = {"train": {"determinism": "bitwise", "virtual_shards": 4}}
    one, two = (case("decoder", Layout(dp=dp, micro_batch=2), GROWS, **fields) for dp in (1, 2))
    results.run(1, [one])
    results.run(2, [two])
    same_bits(results.of(two), results.of(one))
    assert any((~tensor).any() for name, tensor in results.of(one)["state"].items() if name.endswith(".mask"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "lamb", "lion"])
def test_other_optimizers_revive_nothing(results: Results, optimizer: str) -> None:
    fields = {"optimizer": {"name": optimizer, "lr": 2e-4}, "average": {"ema": 0.5}}
    cases = [case("decoder", Layout(dp=2, zero=3), GROWS, **fields)]
    alone = results.run_beside_one_process(2, cases)
    for each in cases:
        found = results.of(each)
        check_equal(found, results.of(alone[each["id"]]))
        for name in (name for name in found["state"] if name.endswith(".mask")):
            parameter = name.removeprefix("prune.").removesuffix(".mask")
            gone = ~found["state"][name]
            assert gone.any()
            held = [
                n for n in found["state"] if n.startswith((f"optim.{parameter}.", f"average.{parameter}"))
            ]
            assert held
            assert not any(found["state"][n][gone].any() for n in [*held, f"model.{parameter}"])

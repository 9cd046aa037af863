"""Under dropout and skipped layers every layout trains what one process trains, and a run that changes its layout is
the same run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness import MODELS, Results, check_equal, cover, layouts_of, reference_of, write_hf_class

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

STEPS = 3
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2, "steps": STEPS}
FIRST = Layout(dp=2, zero=1)
THEN = (Layout(pp=2, tp=2, micro_batch=2), Layout(dp=2, tp=2, sequence=True))
LATER = Layout(dp=2, cp=2, zero=3)


def case(model: str, layout: Layout, **fields: Any) -> dict[str, Any]:
    name = f"{model} {layout} " + " ".join(map(str, fields.values()))
    experts = "moe" in MODELS[model].get("changes", {}) or model == "latent"  # whose layers are not skipped
    skipped = {} if experts else {"layer_drop": 0.25}
    return {
        **MODELS[model],
        **DROPOUT,
        **skipped,
        "name": model,
        "layout": layout.to_json(),
        "id": name,
        **fields,
    }


def cases_of(model: str, world: int, size: int) -> list[dict[str, Any]]:
    return [case(model, layout) for layout in cover(layouts_of(model, world), size)]


CASES = {
    2: [
        *(
            case("decoder", Layout(**way, micro_batch=2))
            for way in (
                {"cp": 2, "zero": 1},
                {"tp": 2, "sequence": True, "recompute": "full"},
                {"dp": 2, "zero": 3, "recompute": "selective"},
            )
        ),
        case("moe", Layout(dp=2, ep=2, micro_batch=2)),
    ],
    4: [case("decoder", Layout(pp=2, dp=2, schedule="interleaved", micro_batch=2))],
}  # fmt: skip
REST = {
    2: [
        *(found for model in ("decoder", "moe", "encoder", "pair") for found in cases_of(model, 2, 1)),
        case("decoder", Layout(pp=2, schedule="zbv", recompute="full", micro_batch=2)),
        case("decoder", Layout(dp=2, zero=1, engine="deepspeed", micro_batch=2)),
        case("decoder", Layout(dp=2, zero=3, engine="deepspeed", recompute="full", micro_batch=1)),
        case("pair", Layout(dp=2, zero=2, micro_batch=2)),
        case("pair", Layout(pp=2, schedule="zbv", micro_batch=2)),
    ],
    4: [*cases_of("decoder", 4, 1), case("latent", Layout(dp=2, cp=2, micro_batch=2))],
}
"""Every feature of a layout."""
ALONE = {found["id"]: found for world in CASES for found in map(reference_of, CASES[world])}
LEG = case("decoder", FIRST, commit=True)
ON, ON_LATER = (
    [case("decoder", layout, restore=LEG["id"]) for layout in layouts] for layouts in (THEN, [LATER])
)
WHOLE = {**reference_of(LEG), "steps": 2 * STEPS, "id": "decoder-whole", "commit": False}
WITHOUT = {**WHOLE, "attention_dropout": 0.0, "id": "decoder-without"}
BARE = {**WITHOUT, "dropout": 0.0, "id": "decoder-bare"}
PLAIN = {**BARE, "layer_drop": 0.0, "id": "decoder-plain"}


HF_CLASSES = [
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"pp": 2, "recompute": "full"},  # where the next micro-batch goes forward before one is computed again
]
HF_CLASSES_LATER = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1, "engine": "deepspeed"}]


def hf_class(layout: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """A class of transformers that has no table here, run as it is."""
    fields = {"model": f"hf:{folder}", "changes": {}, "layout": {"micro_batch": 2, **layout}}
    return {**DROPOUT, "attention_dropout": 0.0, **fields, "id": f"hf class {layout}"}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("neox"))
    write_hf_class(folder)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang, neox: str) -> Results:
    found = Results(tmp_path_factory.mktemp("dropout"), gang)
    found.run(1, [*ALONE.values(), WHOLE, WITHOUT, BARE, PLAIN, hf_class({}, neox)])
    found.run(2, [*CASES[2], LEG])
    found.run(2, [hf_class(layout, neox) for layout in HF_CLASSES])
    found.run(4, [*CASES[4], *ON])
    return found


@pytest.mark.parametrize("found", [*CASES[2], *CASES[4]], ids=lambda found: found["id"])
def test_every_layout_trains_what_one_process_trains(results: Results, found: dict[str, Any]) -> None:
    check_equal(results.of(found), results.of(reference_of(found)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", REST)
def test_every_feature_of_a_layout_trains_what_one_process_trains(results: Results, world: int) -> None:
    results.run(1, list({found["id"]: found for found in map(reference_of, REST[world])}.values()))
    results.run(world, REST[world], 800)
    for found in REST[world]:
        check_equal(results.of(found), results.of(reference_of(found)))


@pytest.mark.parametrize(
    "second",
    [*ON, *(pytest.param(second, marks=pytest.mark.slow) for second in ON_LATER)],
    ids=lambda found: found["id"],
)
def test_a_run_that_changes_its_layout_draws_the_same_masks(results: Results, second: dict[str, Any]) -> None:
    results.run(4, [second])
    legs = [results.of(LEG), results.of(second)]
    whole = {name: legs[0][name] + legs[1][name] for name in ("losses", "averaged", "norms", "extras")}
    ends = {"first": legs[0]["first"], "state": legs[1]["state"], "eval": legs[1]["eval"]}
    check_equal(whole | ends, results.of(WHOLE))


def test_a_mask_moves_the_gradient_norm_by_much_more_than_the_tolerance(results: Results) -> None:
    for one, other in itertools.pairwise(map(results.of, (WHOLE, WITHOUT, BARE, PLAIN))):
        apart = sorted(abs(a / b - 1) for a, b in zip(one["norms"], other["norms"], strict=True))
        assert apart[1] > 1e-3  # one of the steps may be near by chance


@pytest.mark.parametrize(
    "layout", [*HF_CLASSES, *(pytest.param(one, marks=pytest.mark.slow) for one in HF_CLASSES_LATER)], ids=str
)
def test_a_model_run_as_it_is_trains_what_one_process_trains(
    results: Results, neox: str, layout: dict[str, Any]
) -> None:
    results.run(2, [hf_class(layout, neox)])
    check_equal(results.of(hf_class(layout)), results.of(hf_class({})))

"""Statistics by layer are the same under every layout, go on after a restart, and change no bit of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from harness import MODELS, TOLERANCE, Results, same_bits
from lasting_gang import LastingGang

from orchestrator.parallel.layout import Layout

STEPS = 4
COLLECTED = {"layer_statistics": {"every": 2, "activations": True, "histograms": True}}
LAYOUTS = {
    "decoder": [{"dp": 2, "zero": 3}, {"tp": 2, "sequence": True}],
    "moe": [{"dp": 2, "ep": 2, "zero": 1}],
}
MORE = {
    "decoder": [
        *({"dp": 2, "zero": zero} for zero in (0, 1, 2)),
        *({"cp": 2}, {"tp": 2}, {"dp": 2, "recompute": "full"}, {"pp": 2}, {"pp": 2, "schedule": "zbv"}),
    ],
    "moe": [{"dp": 2, "ep": 2}, {"tp": 2}, {"dp": 2, "zero": 2}],
}
CASES = [
    pytest.param(model, layout, marks=marks, id=f"{model} {layout}")
    for layouts, marks in ((LAYOUTS, ()), (MORE, pytest.mark.slow))
    for model, of_model in layouts.items()
    for layout in of_model
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: LastingGang) -> Results:
    return Results(tmp_path_factory.mktemp("layers"), gang)


def case(model: str, layout: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Steps of a model with statistics."""
    found = Layout(**{"micro_batch": 2, **layout})
    return {
        **MODELS[model], "name": model, "steps": STEPS, "layout": found.to_json(), "train": COLLECTED,
        "id": f"{model} {found} {sorted(fields.items())}", **fields,
    }  # fmt: skip


FIRST = case("decoder", LAYOUTS["decoder"][0], steps=3, commit=True)
AGAIN = case("decoder", LAYOUTS["decoder"][0], steps=1, restore=FIRST["id"])
PLAIN = case("decoder", LAYOUTS["decoder"][0], train={})


@pytest.fixture(scope="module")
def two_ranks(results: Results) -> Results:
    """The cases of the default suite, in one start of two ranks."""
    results.run(1, [case(model, {}) for model in LAYOUTS])
    some = [case(model, each) for model, layouts in LAYOUTS.items() for each in layouts]
    results.run(2, [*some, FIRST, AGAIN, PLAIN])
    return results


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_statistics_are_those_of_one_process(two_ranks: Results, model: str, layout: dict[str, Any]) -> None:
    two_ranks.run(2, [case(model, layout)])
    found, alone = (two_ranks.of(case(model, each))["layers"] for each in (layout, {}))
    assert [bool(each) for each in found] == [False, True, False, True]
    for ours, theirs in zip(found[1::2], alone[1::2], strict=True):
        assert ours.keys() == theirs.keys()
        largest = max(each.get("gradient_norm", 0.0) for each in theirs.values())
        for name, wanted in theirs.items():
            assert ours[name].keys() == wanted.keys()
            for kind, value in wanted.items():
                if kind.endswith("histogram"):
                    _check_histogram(ours[name][kind], value)
                    continue
                # A key's bias has a gradient that is nothing but rounding, and begins at zero.
                beside = 1e-6 * largest if name.endswith("key.bias") else 0.0
                assert ours[name][kind] == pytest.approx(value, rel=TOLERANCE, abs=beside), (name, kind)


def _check_histogram(found: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """The same elements. A few lie so close to a power of two that rounding decides; a key's bias is rounding alone."""
    size = sum(wanted.values())
    assert sum(found.values()) == size
    moved = sum(abs(found.get(key, 0) - wanted.get(key, 0)) for key in {*found, *wanted})
    assert moved <= (2 * size if size <= 32 else max(4, size // 100))


def test_a_restart_collects_the_same_steps_with_the_same_values(two_ranks: Results) -> None:
    (again,) = two_ranks.of(AGAIN)["layers"]
    assert again == two_ranks.of(case("decoder", LAYOUTS["decoder"][0]))["layers"][3]


def test_statistics_change_no_bit_of_training(two_ranks: Results) -> None:
    found = two_ranks.of(PLAIN)
    assert not any(found["layers"])
    same_bits(two_ranks.of(case("decoder", LAYOUTS["decoder"][0])), found)

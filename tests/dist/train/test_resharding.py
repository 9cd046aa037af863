"""A commit made under one layout goes on under any other, as if nothing had happened."""

import itertools
from typing import Any

import pytest
from harness import MODELS, WIDE, Results, check_equal, same_bits

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

STEPS = 2
WALKS: dict[str, list[Layout]] = {
    "decoder": [
        Layout(dp=4, zero=1),
        Layout(pp=2, tp=2, micro_batch=2),
        Layout(dp=2, cp=2, zero=3),
        Layout(pp=2, dp=2, zero=2, schedule="zbv", first_less=2, last_less=2),
        Layout(dp=2, tp=2, zero=1, sequence=True),
    ],
    "moe": [
        Layout(dp=4, ep=2, zero=1),
        Layout(pp=2, dp=2, ep=2, schedule="interleaved", first_less=2, last_less=2),
        Layout(cp=2, tp=2),
    ],
    "pair": [Layout(pp=4, schedule="gpipe"), Layout(dp=2, tp=2, zero=3)],
    "wide": [Layout(dp=2, tp=2, zero=3), Layout(pp=2, dp=2, ep=2), Layout(dp=4, zero=1)],
}
"""Layouts of four ranks, each of which goes on from the commit of the one before. Two have a first and a last stage
without layers."""
TRAINED = {
    **MODELS,
    "decoder": {**MODELS["decoder"], "average": {"ema": 0.5}},
    "moe": {**MODELS["moe"], "average": {"ema": 0.5}},
    "wide": WIDE,
}
"""Two have a moving average, with which they are evaluated between all steps."""


LATER = ("pair", "wide")
"""Of the long suite."""
EACH = [pytest.param(model, marks=pytest.mark.slow) if model in LATER else model for model in WALKS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    found, models = Results(tmp_path_factory.mktemp("resharding"), gang), [m for m in WALKS if m not in LATER]
    found.run(1, [*map(alone, models), PLAIN])
    found.run(4, [case for model in models for case in walk(model)])
    return found


def alone(model: str) -> dict[str, Any]:
    steps = STEPS * len(WALKS[model])
    return {**TRAINED[model], "id": f"{model}-alone", "steps": steps, "layout": {"micro_batch": 2}}


PLAIN = {**alone("decoder"), "average": None, "id": "plain"}


def walk(model: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for number, layout in enumerate(WALKS[model]):
        case = {**TRAINED[model], "layout": layout.to_json(), "steps": STEPS, "id": f"{model}-{number}"}
        cases.append({**case, "commit": True} | ({"restore": cases[-1]["id"]} if cases else {}))
    return cases


@pytest.mark.parametrize("model", EACH)
def test_a_run_that_changes_its_layout_is_the_same_run(results: Results, model: str) -> None:
    """With other micro-batches, too.

    Requests: torchtitan#811, Automodel#533, DeepSpeed#7200, verl#2265, transformers#43718.
    """
    results.run(1, [alone(model)])
    results.run(4, walk(model))
    legs = [results.of(case) for case in walk(model)]
    reference = results.of(alone(model))
    whole = {
        "losses": [loss for leg in legs for loss in leg["losses"]],
        "norms": [norm for leg in legs for norm in leg["norms"]],
        "extras": [extra for leg in legs for extra in leg["extras"]],
        "eval": legs[-1]["eval"],
        "averaged": [loss for leg in legs for loss in leg["averaged"]],
        "first": legs[0]["first"],
        "state": legs[-1]["state"],
    }
    check_equal(whole, reference)


@pytest.mark.parametrize("model", EACH)
def test_a_commit_is_taken_over_bit_by_bit(results: Results, model: str) -> None:
    results.run(4, walk(model))
    legs = [results.of(case) for case in walk(model)]
    for before, after in itertools.pairwise(legs):
        assert before["state"].keys() == after["first"].keys()
        for name, tensor in before["state"].items():
            assert after["first"][name].equal(tensor), name


def test_an_average_and_evaluations_with_it_leave_the_training_as_it_is(results: Results) -> None:
    found, plain = results.of(alone("decoder")), results.of(PLAIN)
    same_bits(found, plain)
    assert found["eval"] == plain["eval"]
    assert {name.partition(".")[0] for name in found["state"]} == {"model", "optim", "average"}
    assert all(a != b for a, b in itertools.pairwise([*found["averaged"], found["eval"]["loss"]]))

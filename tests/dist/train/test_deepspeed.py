"""The DeepSpeed engine trains what the torch engine trains, and what one process trains.

Equal is what `harness.check_equal` says: initial weights bit by bit; losses, gradient norms, weights and optimiser
state within 1e-5. DeepSpeed's own optimiser runs where state is offloaded, torch's elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import MODELS, Results, check_equal, reference_of

ONE, TWO, THREE = {"zero": 1}, {"zero": 2}, {"zero": 3}
WAYS = [ONE, TWO, THREE, {**TWO, "offload": "optimizer"}, {**THREE, "offload": "parameters"}]
PRECISIONS = {"bf16": 2**-8, "fp16": 2**-11}
"""Unit roundoff."""


def case(model: str, world: int, way: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Three steps of two micro-batches a rank, or as many as `micro_batch` in the way leaves."""
    layout = {"engine": "deepspeed", "dp": world, "micro_batch": 2, **way}
    name = " ".join([model, *(f"{key} {value}" for key, value in fields.items())])
    name = "".join(c for c in name if c.isalnum() or c in " -.")
    way_name = " ".join(f"{key}-{value}" for key, value in way.items())
    changes = {**MODELS[model], **fields}
    return {**changes, "name": name, "id": f"{name} on {world} {way_name}", "steps": 3, "layout": layout}


QUICK = [*(case("decoder", 2, way) for way in WAYS), case("encoder", 2, {**THREE, "micro_batch": 1})]
ALL = {
    1: [case("decoder", 1, way) for way in WAYS],
    2: [
        *(
            case(model, 2, way)
            for model in ("modern", "moe", "latent", "pair", "pair-moe")
            for way in (TWO, THREE)
        ),
        *(case("decoder", 2, way, optimizer={"clip": clip}) for way in (ONE, THREE) for clip in (None, 0.05)),
        *(case("decoder", 2, {**way, "recompute": "full"}) for way in (ONE, TWO, THREE)),
        case("decoder", 2, TWO, train={"z_loss": 1e-2}),
        case("decoder", 2, {**ONE, "offload": "optimizer"}),
        case("decoder", 2, {**THREE, "offload": "optimizer"}),
    ],
    4: [case("decoder", 4, {**way, "micro_batch": 1}) for way in WAYS],
}
HALVES = [case("decoder", 2, way, train={"precision": p}) for way in (TWO, THREE) for p in PRECISIONS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("deepspeed"))


def run(results: Results, world: int, cases: list[dict[str, Any]], timeout: float = 280) -> None:
    """The cases in one gang, and their references in another."""
    results.run(1, list({r["id"]: r for r in map(reference_of, cases)}.values()), timeout)
    results.run(world, cases, timeout)


@pytest.mark.parametrize("one", QUICK, ids=lambda one: one["id"])
def test_two_ranks_train_what_one_process_trains(results: Results, one: dict[str, Any]) -> None:
    run(results, 2, QUICK)
    check_equal(results.of(one), results.of(reference_of(one)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world", "number"), [(w, n) for w, cases in ALL.items() for n in range(len(cases))])
def test_every_model_and_mode_trains_what_one_process_trains(
    results: Results, world: int, number: int
) -> None:
    run(results, world, ALL[world], 1500)
    one = ALL[world][number]
    check_equal(results.of(one), results.of(reference_of(one)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", HALVES, ids=lambda one: one["id"])
def test_half_precision_agrees_to_its_rounding(results: Results, one: dict[str, Any]) -> None:
    run(results, 2, HALVES, 800)
    found, reference = results.of(one), results.of(reference_of(one))
    unit = PRECISIONS[one["train"]["precision"]]
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=unit, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=8 * unit, atol=0)
    assert {t.dtype for n, t in found["state"].items() if n.startswith("model.")} == {torch.float32}
    assert found["state"].keys() == reference["state"].keys()

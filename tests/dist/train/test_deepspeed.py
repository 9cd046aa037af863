"""The DeepSpeed engine trains what the torch engine trains, and what one process trains.

Equal is what `harness.check_equal` says: initial weights bit by bit; losses, gradient norms, weights and optimiser
state within 1e-5. DeepSpeed's own optimiser runs where state is offloaded, torch's elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import MODELS, Results, check_equal, reference_of, same_bits, write_hf_class

from cluster.workers.process_gang import ProcessGang

pytestmark = pytest.mark.timeout(600)
ONE, TWO, THREE = {"zero": 1}, {"zero": 2}, {"zero": 3}
STAGED = [ONE, TWO, THREE]
OFFLOADED = [{**TWO, "offload": "optimizer"}, {**THREE, "offload": "parameters"}]
"""The first run of these on a machine compiles an operator of DeepSpeed for minutes: only in the long suite."""
PRECISIONS = {"bf16": 2**-8, "fp16": 2**-11}
"""Unit roundoff."""
Case = dict[str, Any]


def case(model: str, world: int, way: dict[str, Any], **fields: Any) -> Case:
    """Three steps of two micro-batches a rank, or as many as `micro_batch` in the way leaves."""
    layout = {"engine": "deepspeed", "dp": world, "micro_batch": 2, **way}
    name = " ".join([model, *(f"{key} {value}" for key, value in fields.items())])
    name = "".join(c for c in name if c.isalnum() or c in " -.")
    way_name = " ".join(f"{key}-{value}" for key, value in way.items())
    changes = {**MODELS.get(model, {}), "steps": 3, **fields}
    return {**changes, "name": name, "id": f"{name} on {world} {way_name}", "layout": layout}


def twin_of(one: Case) -> Case:
    """The same case on the torch engine."""
    layout = {k: v for k, v in one["layout"].items() if k not in ("engine", "offload")}
    return {**one, "layout": layout, "id": f"{one['id']} on torch"}


QUICK = [
    case("decoder", 2, TWO, average={"ema": 0.5}),
    case("encoder", 2, {**THREE, "micro_batch": 1}),
]
"""Of the default suite, where `test_dropout` has the first stage."""
OVERFLOWS_LATER, OVERFLOWS = (
    case("decoder", 2, way, train={"precision": "fp16", "z_loss": 1e2}, steps=8) for way in (TWO, THREE)
)
RESUMED_LATER, RESUMED = (case("decoder", 2, way, steps=2, average={"ema": 0.5}) for way in (TWO, THREE))
"""Two steps and a commit, two more from it; and four at a stretch."""
ALL = {
    1: [case("decoder", 1, way) for way in (ONE, TWO, THREE, *OFFLOADED)],
    2: [
        *(case("decoder", 2, way, average={"ema": 0.5}) for way in (ONE, THREE)),
        case("decoder", 2, THREE, mup={"hidden": 8, "intermediate": 16}),
        *(case(m, 2, way) for m in ("modern", "moe", "latent", "pair", "pair-moe") for way in (TWO, THREE)),
        *(case("decoder", 2, way, optimizer={"clip": clip}) for way in (ONE, THREE) for clip in (None, 0.05)),
        *(case("decoder", 2, {**way, "recompute": "full"}) for way in (ONE, TWO, THREE)),
        case("decoder", 2, TWO, train={"z_loss": 1e-2}),
        case("decoder", 2, THREE, train={"label_smoothing": 0.1}),
        case(
            "decoder",
            2,
            TWO,
            optimizer={"groups": [{"match": ["tokens.*"], "lr_scale": 0.1, "weight_decay": 0.0}]},
        ),
        case("decoder", 2, TWO, mup={"hidden": 8, "intermediate": 16}),
        *(case("decoder", 2, way) for way in OFFLOADED),
        case("decoder", 2, {**ONE, "offload": "optimizer"}, average={"ema": 0.5}),
        case("decoder", 2, {**THREE, "offload": "optimizer"}),
    ],
    4: [case("decoder", 4, {**way, "micro_batch": 1}) for way in [*STAGED, *OFFLOADED]],
}
HALVES = [case("decoder", 2, way, train={"precision": p}) for way in (TWO, THREE) for p in PRECISIONS]


def hf_class(zero: int, folder: str = "") -> Case:
    """A class of transformers that has no table here, run as it is; zero 0 is one process on torch."""
    layout = {"engine": "deepspeed", "dp": 2, "zero": zero, "micro_batch": 2} if zero else {"micro_batch": 2}
    return {"model": f"hf:{folder}", "changes": {}, "steps": 3, "layout": layout, "id": f"hf class {zero}"}


def parts_of(one: Case) -> tuple[Case, Case, Case]:
    """Steps up to a commit, steps from it on, and all of them at a stretch."""
    first = {**one, "id": f"{one['id']} first", "commit": True}
    return (
        first,
        {**one, "id": f"{one['id']} second", "restore": first["id"]},
        {**one, "id": f"{one['id']} whole", "steps": 2 * one["steps"]},
    )


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("neox"))
    write_hf_class(folder)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang, neox: str) -> Results:
    """Two starts for all tests of the default suite: importing DeepSpeed takes longer than their steps."""
    results = Results(tmp_path_factory.mktemp("deepspeed"), gang)
    results.run(1, [*references(QUICK), hf_class(0, neox)])
    results.run(2, [twin_of(OVERFLOWS), *QUICK, OVERFLOWS, *parts_of(RESUMED), hf_class(3, neox)])
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return Results(tmp_path_factory.mktemp("deepspeed-long"), gang)


def references(cases: list[Case]) -> list[Case]:
    """The same on one process, each once."""
    return list({r["id"]: r for r in map(reference_of, cases)}.values())


@pytest.mark.contract
@pytest.mark.parametrize("one", QUICK, ids=lambda one: one["id"])
def test_it_trains_what_one_process_trains(quick: Results, one: Case) -> None:
    check_equal(quick.of(one), quick.of(reference_of(one)))


@pytest.mark.slow
@pytest.mark.parametrize("one", QUICK, ids=lambda one: one["id"])
def test_it_trains_what_the_torch_engine_trains_at_the_same_stage(quick: Results, one: Case) -> None:
    """As both train what one process trains."""
    quick.run(2, [twin_of(one) for one in QUICK])
    check_equal(quick.of(one), quick.of(twin_of(one)))


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2)), 3])
def test_a_model_run_as_it_is_trains_under_every_zero_stage(quick: Results, neox: str, zero: int) -> None:
    quick.run(2, [hf_class(zero, neox)])
    check_equal(quick.of(hf_class(zero)), quick.of(hf_class(0)))


@pytest.mark.parametrize(
    "one", [pytest.param(OVERFLOWS_LATER, marks=pytest.mark.slow), OVERFLOWS], ids=lambda one: one["id"]
)
def test_an_overflow_skips_the_steps_that_the_torch_engine_skips(quick: Results, one: Case) -> None:
    quick.run(2, [one, twin_of(one)])
    found, reference = quick.of(one), quick.of(twin_of(one))
    skipped = [extra["skipped"] for extra in found["extras"]]
    assert skipped == [extra["skipped"] for extra in reference["extras"]]
    assert set(skipped) == {0.0, 1.0}
    for name in ("optim.step", "optim.loss_scale"):
        assert torch.equal(found["state"][name], reference["state"][name])
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=PRECISIONS["fp16"], atol=0)


@pytest.mark.parametrize(
    "one", [pytest.param(RESUMED_LATER, marks=pytest.mark.slow), RESUMED], ids=lambda one: one["id"]
)
def test_a_resume_under_the_same_layout_has_the_same_bits(quick: Results, one: Case) -> None:
    quick.run(2, [*parts_of(one)])
    first, second, whole = (quick.of(part) for part in parts_of(one))
    joined = {key: first[key] + second[key] for key in ("losses", "norms")}
    same_bits({**second, **joined}, whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world", "number"), [(w, n) for w, cases in ALL.items() for n in range(len(cases))])
def test_every_model_and_mode_trains_what_one_process_trains(
    results: Results, world: int, number: int
) -> None:
    results.run(1, references(ALL[world]), 1500)
    results.run(world, ALL[world], 1500)
    one = ALL[world][number]
    check_equal(results.of(one), results.of(reference_of(one)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", HALVES, ids=lambda one: one["id"])
def test_half_precision_agrees_to_its_rounding(results: Results, one: Case) -> None:
    results.run(1, references(HALVES), 800)
    results.run(2, HALVES, 800)
    found, reference = results.of(one), results.of(reference_of(one))
    unit = PRECISIONS[one["train"]["precision"]]
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=unit, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=8 * unit, atol=0)
    assert {t.dtype for n, t in found["state"].items() if n.startswith("model.")} == {torch.float32}
    assert found["state"].keys() == reference["state"].keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", OFFLOADED, ids=lambda way: way["offload"])
def test_a_resume_with_offload_has_the_same_bits(results: Results, way: dict[str, Any]) -> None:
    first, second, whole = (results_of(results, part) for part in parts_of(case("decoder", 2, way, steps=2)))
    joined = {key: first[key] + second[key] for key in ("losses", "norms")}
    same_bits({**second, **joined}, whole)


def results_of(results: Results, one: Case) -> dict[str, Any]:
    results.run(2, [one], 600)
    return results.of(one)

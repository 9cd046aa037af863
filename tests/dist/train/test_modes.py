"""Precision, recomputation, optimisers, offload and bitwise determinism under layouts of two and four ranks."""

from typing import Any

import pytest
import torch
from harness import MODELS, Results, check_equal, same_bits, write_hf_class

from cluster.workers.process_gang import ProcessGang

DECODER = {"name": "decoder", **MODELS["decoder"], "steps": 3}
TP, PP, DP = {"tp": 2}, {"pp": 2, "schedule": "interleaved"}, {"dp": 2, "zero": 1}
FULL, CP = {"dp": 2, "zero": 3}, {"cp": 2}
SPLIT = {"pp": 2, "schedule": "zbv"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {"optimizer": {"name": "lamb"}},
    "lars": {"optimizer": {"name": "lars", "lr": 1.0}},
    "lion": {"optimizer": {"name": "lion", "lr": 2e-4}},
    "muon": {"optimizer": {"name": "muon"}},
}
Z_LOSS = {"train": {"z_loss": 1e-2}}
SMOOTH = {"train": {"label_smoothing": 0.1}}
GROUPS = {
    "optimizer": {
        "groups": [
            {"match": ["tokens.*"], "lr_scale": 0.1, "weight_decay": 0.0},
            {"match": ["*.attention.*", "head.*"], "lr_scale": 3.0, "weight_decay": 0.7},
        ]
    }
}


def named(*rows: tuple[str, dict[str, Any], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cases by the name of a mode and its layout."""
    return {
        f"{name} {layout}": {"layout": {"micro_batch": 2, **layout}, **fields}
        for name, layout, fields in rows
    }


EXACT = named(
    ("recompute", {**PP, "recompute": "selective"}, {}),
    ("offload", {**FULL, "offload": "optimizer"}, {}),
    ("lamb", FULL, OPTIMIZERS["lamb"]),
    ("muon", PP, OPTIMIZERS["muon"]),
    ("z-loss", TP, Z_LOSS),
    ("groups", FULL, GROUPS),
)
EXACT_LATER = named(
    ("recompute", {**CP, "recompute": "full"}, {}),
    ("lars", TP, OPTIMIZERS["lars"]),
    ("lion", FULL, OPTIMIZERS["lion"]),
    ("layers", PP, {"optimizer": {"layer_decay": 0.5}}),
    ("smooth", TP, SMOOTH),
    ("recompute", {**TP, "recompute": "full", "sequence": True}, {}),
    ("recompute", {**FULL, "recompute": "selective"}, {}),
    ("recompute", {**SPLIT, "recompute": "full"}, {}),
    ("offload", {**DP, "offload": "optimizer"}, {}),
    ("lamb", TP, OPTIMIZERS["lamb"]),
    ("lars", DP, OPTIMIZERS["lars"]),
    ("experts", {**DP, "ep": 2}, {**MODELS["moe"], **OPTIMIZERS["lamb"]}),
    ("experts", TP, {**MODELS["moe"], **OPTIMIZERS["lamb"]}),
    ("experts", {**FULL, "ep": 2}, {**MODELS["moe"], **OPTIMIZERS["lamb"]}),
    ("lion", PP, OPTIMIZERS["lion"]),
    ("muon", FULL, OPTIMIZERS["muon"]),
    ("z-loss", PP, Z_LOSS),
    *(("smooth", layout, SMOOTH) for layout in (DP, FULL, PP, CP)),
    *(("groups", layout, GROUPS) for layout in (DP, TP, PP)),
)
"""Of the long suite: `test_dropout` recomputes under these layouts in the default one."""
EIGHT_BITS = {
    "changes": {**DECODER["changes"], "hidden": 96, "intermediate": 320},
    "optimizer": {"name": "adamw_8bit"},
}
"""Rows of 96 and 320 numbers: tensor parallelism cuts through blocks, as do the slices of ZeRO 1."""
IN_8_BITS = named(
    ("8bit", TP, EIGHT_BITS),
    ("8bit", DP, EIGHT_BITS),
)
IN_8_BITS_LATER = named(
    ("8bit", PP, EIGHT_BITS),
    ("8bit", FULL, EIGHT_BITS),
    ("8bit", {"dp": 2, "zero": 2}, EIGHT_BITS),
    ("8bit", CP, EIGHT_BITS),
    ("8bit", {"dp": 2}, EIGHT_BITS),
    ("8bit", {**DP, "offload": "optimizer"}, EIGHT_BITS),
    (
        "8bit-experts",
        {**DP, "ep": 2},
        {
            **EIGHT_BITS,
            **MODELS["moe"],
            "changes": {**MODELS["moe"]["changes"], "hidden": 96, "moe": {"experts": 4, "intermediate": 80}},
        },
    ),
)
IN_8_BITS_OF_FOUR = named(
    ("8bit", {"tp": 2, "dp": 2, "zero": 1}, EIGHT_BITS),
    ("8bit", {"tp": 2, "dp": 2, "zero": 3}, EIGHT_BITS),
    ("8bit", {"pp": 2, "dp": 2, "zero": 1, "micro_batch": 1}, EIGHT_BITS),
    ("8bit", {"dp": 4, "zero": 3, "shard": 2, "micro_batch": 1}, EIGHT_BITS),
)
WIDER: dict[str, dict[str, Any]] = {
    "muon in copies": {
        "layout": {"dp": 4, "zero": 3, "shard": 2, "micro_batch": 1},
        "optimizer": {"name": "muon"},
    }
}
"""The same on four ranks."""
UNITS = {"bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-8}
"""Unit roundoff; what linear layers round to 8 bits is the same numbers in every layout."""
HALVES_OF_FOUR = [{"pp": 2, "dp": 2, "zero": zero, "micro_batch": 1} for zero in (1, 2)]
HALVES = [
    ("bf16", FULL),
    ("fp16", TP),
    ("fp8", FULL),
    ("bf16", HALVES_OF_FOUR[0]),
]
HALVES_LATER = [
    (precision, layout)
    for precision in UNITS
    for layout in (TP, FULL, SPLIT, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, *HALVES_OF_FOUR)
    if (precision, layout) not in HALVES
]
"""Layouts in 16 and 8 bits, each with several micro-batches a step; the later ones are of the long suite."""
BITWISE = {"steps": 16, "train": {"determinism": "bitwise", "virtual_shards": 4}}


def case_of(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**DECODER, "id": name, **fields}


def alone(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**DECODER, **fields, "layout": {"micro_batch": 2}, "id": name.partition(" ")[0] + "-alone"}


def bitwise(width: int, **fields: Any) -> dict[str, Any]:
    return case_of(
        f"bitwise-{width}-{len(fields)}", {**BITWISE, "layout": {"dp": width, "micro_batch": 2}, **fields}
    )


def hf_class(zero: int, folder: str = "") -> dict[str, Any]:
    """A class of transformers that has no table here, run as it is; zero -1 is one process."""
    layout = {"dp": 2, "zero": zero} if zero >= 0 else {}
    fields = {"model": f"hf:{folder}", "changes": {}, "steps": 3, "layout": {"micro_batch": 2, **layout}}
    return {**fields, "id": f"hf class {zero}"}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("neox"))
    write_hf_class(folder)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    found = Results(tmp_path_factory.mktemp("modes"), gang)
    references = {r["id"]: r for r in (alone(n, f) for n, f in {**EXACT, **IN_8_BITS}.items())}
    precise = [precision_case(p, {}) for p in UNITS]
    found.run(1, [*references.values(), *precise, bitwise(1)])
    halves = [precision_case(*each) for each in HALVES if each[1] not in HALVES_OF_FOUR]
    tree = [bitwise(2), bitwise(2, steps=8, commit=True)]
    found.run(2, [case_of(n, f) for n, f in {**EXACT, **IN_8_BITS}.items()] + halves + tree)
    found.run(
        4,
        [case_of(n, f) for n, f in WIDER.items()]
        + [bitwise(4), bitwise(4, steps=8, restore=tree[1]["id"])]
        + [precision_case(*each) for each in HALVES if each[1] in HALVES_OF_FOUR],
    )
    return found


def precision_case(precision: str, layout: dict[str, Any]) -> dict[str, Any]:
    name = f"{precision} {layout}"
    return case_of(name, {"train": {"precision": precision}, "layout": {"micro_batch": 2, **layout}})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *EXACT.items(),
        *WIDER.items(),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in EXACT_LATER.items()),
    ],
)
def test_a_mode_changes_nothing_that_one_process_would_not(
    results: Results, name: str, fields: dict[str, Any]
) -> None:
    results.run(1, [alone(name, fields)])
    results.run(2, [case_of(name, fields)])
    check_equal(results.of(case_of(name, fields)), results.of(alone(name, fields)))


@pytest.mark.parametrize(
    ("world", "name", "fields"),
    [
        *((2, *item) for item in IN_8_BITS.items()),
        *(pytest.param(2, *item, marks=pytest.mark.slow) for item in IN_8_BITS_LATER.items()),
        *(pytest.param(4, *item, marks=pytest.mark.slow) for item in IN_8_BITS_OF_FOUR.items()),
    ],
)
def test_moments_in_8_bits_are_those_of_one_process(
    results: Results, world: int, name: str, fields: dict[str, Any]
) -> None:
    """A gradient's last bits may make another code the nearest, so single numbers differ by up to a code: at most 3 in
    1,000 on each kind of processor that ran this."""
    results.run(1, [alone(name, fields)])
    results.run(world, [case_of(name, fields)])
    found, wanted = results.of(case_of(name, fields)), results.of(alone(name, fields))
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["norms"], wanted["norms"], rtol=1e-4, atol=0)
    state = wanted["state"]
    assert found["state"].keys() == state.keys()
    codes = [each for each in state if each.endswith("_code")]
    assert codes
    for each in codes:
        assert state[each].dtype is torch.uint8
        assert (found["state"][each] == state[each]).float().mean() > 0.995, each
        scale = each.removesuffix("_code") + "_scale"
        torch.testing.assert_close(found["state"][scale], state[scale], rtol=0.05, atol=1e-12)
    for each in (each for each in state if each.startswith("model.")):
        assert ((found["state"][each] - state[each]).abs() < 1e-6).float().mean() > 0.999, each


def test_moments_in_8_bits_go_on_under_any_layout(results: Results) -> None:
    """The same bits are loaded; under the same layout the run has the bits of one that was not interrupted."""
    tensor = {"layout": {"micro_batch": 2, **TP}, **EIGHT_BITS}
    first = case_of("8bit-first", {**tensor, "commit": True})
    same = case_of("8bit-same", {**tensor, "restore": first["id"]})
    whole = case_of("8bit-whole", {**tensor, "steps": 6})
    other = case_of("8bit-other", {**tensor, "layout": {"micro_batch": 2, **DP}, "restore": first["id"]})
    results.run(2, [first, same, whole, other])
    before, found = results.of(first), results.of(same)
    joined = {key: before[key] + found[key] for key in ("losses", "norms")}
    same_bits({**found, **joined}, results.of(whole))
    loaded = results.of(other)["first"]
    assert loaded.keys() == before["state"].keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before["state"].items())
    torch.testing.assert_close(results.of(other)["losses"], found["losses"], rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_a_model_run_as_it_is_trains_under_every_zero_stage(results: Results, neox: str, zero: int) -> None:
    """`test_dropout` has stages 0 and 3 in the default suite."""
    results.run(1, [hf_class(-1, neox)])
    results.run(2, [hf_class(zero, neox)])
    check_equal(results.of(hf_class(zero)), results.of(hf_class(-1)))


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        *HALVES,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in HALVES_LATER),
    ],
    ids=str,
)
def test_half_precision_agrees_to_its_rounding(
    results: Results, precision: str, layout: dict[str, Any]
) -> None:
    unit = UNITS[precision]
    results.run(4 if layout in HALVES_OF_FOUR else 2, [precision_case(precision, layout)])
    found, reference = (results.of(precision_case(precision, where)) for where in (layout, {}))
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=unit, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=8 * unit, atol=0)
    weights = {n: t for n, t in found["state"].items() if n.startswith("model.")}
    assert {t.dtype for t in weights.values()} == {torch.float32}


def test_linear_layers_have_8_bits_on_either_engine(results: Results) -> None:
    """Not those of 16 alone; under DeepSpeed the same as here."""
    theirs = precision_case("fp8", {"dp": 2, "zero": 3, "engine": "deepspeed"})
    results.run(2, [theirs])
    eight, sixteen = results.of(precision_case("fp8", {})), results.of(precision_case("bf16", {}))
    assert abs(eight["losses"][0] / sixteen["losses"][0] - 1) > 2**-15
    torch.testing.assert_close(results.of(theirs)["losses"], eight["losses"], rtol=2**-16, atol=0)


def test_fp16_reports_its_scale(results: Results) -> None:
    extras = results.of(precision_case("fp16", TP))["extras"]
    assert all(extra["loss_scale"] >= 1 and extra["skipped"] in (0.0, 1.0) for extra in extras)
    assert "optim.loss_scale" in results.of(precision_case("fp16", TP))["state"]


@pytest.mark.parametrize("width", [2, 4])
def test_bitwise_has_the_same_bits_at_every_width(results: Results, width: int) -> None:
    same_bits(results.of(bitwise(width)), results.of(bitwise(1)))


def test_bitwise_has_the_same_bits_across_a_change_of_width(results: Results) -> None:
    first = results.of(bitwise(2, steps=8, commit=True))
    second = results.of(bitwise(4, steps=8, restore="x"))
    joined = {
        **second,
        "losses": first["losses"] + second["losses"],
        "norms": first["norms"] + second["norms"],
    }
    same_bits(joined, results.of(bitwise(1)))

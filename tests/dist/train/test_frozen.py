"""Parameters that are not trained, under every kind of layout and both engines: as one process, and in no commit."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Results, check_equal, reference_of, same_bits, write_hf_class

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

MODELS: dict[str, dict[str, Any]] = {
    "below": {"model": "gpt-tiny", "freeze": ["tokens.*", "embeddings.*", "layers.0.*"]},
    "biases": {"model": "gpt-tiny", "freeze": ["*.weight"], "average": {"ema": 0.9}},
    "norms": {"model": "qwen3-tiny", "changes": {"kv_heads": 2}, "freeze": ["*norm.weight"]},
    "router": {
        "model": "mixtral-tiny",
        "changes": {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, "initial_std": 0.1},
        "freeze": ["*.router.weight", "layers.0.feedforward.experts.down"],
    },
    "muon": {"model": "gpt-tiny", "freeze": ["layers.0.*", "tokens.*"], "optimizer": {"name": "muon"}},
    "lamb": {"model": "gpt-tiny", "freeze": ["layers.0.*", "tokens.*"], "optimizer": {"name": "lamb"}},
}
QUICK: list[tuple[str, dict[str, Any]]] = [("below", {"pp": 2}), ("biases", {"dp": 2, "zero": 1})]
REST: list[tuple[str, dict[str, Any]]] = [
    *((model, {"dp": 2, "zero": zero}) for model in MODELS for zero in (0, 1, 2, 3)),
    *((model, {"tp": 2}) for model in MODELS),
    ("norms", {"tp": 2, "sequence": True}),
    *((model, {"pp": 2}) for model in MODELS),
    *((model, {"pp": 2, "schedule": "zbv"}) for model in ("norms", "router")),
    *((model, {"dp": 2, "zero": zero, "engine": "deepspeed"}) for model in MODELS for zero in (1, 2, 3)
      if model not in ("lamb", "muon")),
    *(("router", {"dp": 2, "ep": 2, "zero": zero}) for zero in (0, 3)),
    ("biases", {"cp": 2}),
]  # fmt: skip


def case_of(name: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = Layout(**{"micro_batch": 2, **layout})
    fields = {k: v for k, v in MODELS[name].items() if k != "freeze"}
    train = {"freeze": MODELS[name]["freeze"]}
    case = {"name": name, **fields, "train": train, "steps": 3, "layout": found.to_json()}
    return {**case, "id": f"{name} {found}", **more}


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "all"])
def test_what_is_not_trained_is_not_committed_under_any_layout(
    layouts: list[tuple[str, dict[str, Any]]], gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    cases = [case_of(*each) for each in layouts]
    alone = results.run_beside_one_process(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone[case["id"]]))
        kept = results.of(case)["state"]
        assert "model.layers.1.attention.query.bias" in kept or case["name"] in ("norms", "router")
        lost = {"biases": "layers.1.attention.query.weight", "norms": "norm.weight"}
        assert f"model.{lost.get(case['name'], 'layers.0.feedforward.experts.down')}" not in kept


@pytest.mark.slow
def test_a_class_that_runs_as_it_is_is_frozen_in_part(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("class"))
    write_hf_class(folder)
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    frozen = {"model": f"hf:{folder}", "changes": {}, "train": {"freeze": ["*embed_in*", "*layers.0.*"]}}
    cases = []
    for layout in ({"dp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 2, "engine": "deepspeed"}):
        found = Layout(**{"micro_batch": 2, **layout})
        fields = {"name": "class", **frozen, "steps": 3, "layout": found.to_json()}
        cases.append({**fields, "id": f"class {found}"})
    alone = reference_of(cases[0])
    results.run(1, [alone])
    results.run(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone))
        assert not [name for name in results.of(case)["state"] if ".layers.0." in name]


@pytest.mark.slow
def test_bits_do_not_depend_on_the_width_where_that_is_asked_for(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    exact = {"determinism": "bitwise", "virtual_shards": 4, "freeze": MODELS["below"]["freeze"]}
    two = case_of("below", {"dp": 2}, train=exact, id="two")
    one = case_of("below", {}, train=exact, id="one")
    results.run(1, [one])
    results.run(2, [two])
    same_bits(results.of(two), results.of(one))


def test_a_restored_run_has_the_weights_that_its_commit_lacks(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    through = case_of("below", {"dp": 2, "zero": 3}, steps=4, id="through")
    half = case_of("below", {"dp": 2, "zero": 3}, steps=2, id="half", commit=True)
    rest = case_of("below", {"dp": 2, "zero": 3}, steps=2, id="rest", restore="half")
    results.run(2, [through, half, rest])
    whole, parts = results.of(through), [results.of(half), results.of(rest)]
    joined = {k: parts[0][k] + parts[1][k] for k in ("losses", "norms")} | {"state": parts[1]["state"]}
    same_bits(joined, whole)

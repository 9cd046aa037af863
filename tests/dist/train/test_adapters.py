"""Adapters under every kind of layout, and both engines: as one process."""

from __future__ import annotations

from typing import Any

import pytest
from base_run import save_class, save_dense, save_experts
from harness import Results, check_equal, same_bits

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout
from workloads.adapters.adapter import PROMPTS

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4, "targets": ["*.attention.*", "*.feedforward.*"]},
    "rslora": {"kind": "rslora", "rank": 3, "targets": ["*.attention.query", "*.feedforward.down"]},
    "of experts": {"kind": "lora", "rank": 4, "targets": ["*.experts.*", "*.attention.query"]},
    "dora": {"kind": "dora", "rank": 4, "targets": ["*.attention.*", "*.down"]},
    "prefix": {"kind": "prefix", "rank": 5},
    "prompt": {"kind": "prompt", "rank": 5},
    "p_tuning": {"kind": "p_tuning", "rank": 4},
    "houlsby": {"kind": "houlsby", "rank": 8},
    "bitfit": {"kind": "bitfit"},
    "nf4": {"kind": "lora", "rank": 4, "targets": ["*.attention.*", "*.down"], "quantize": "nf4"},
    "dora nf4": {"kind": "dora", "rank": 4, "targets": ["*.attention.output", "*.up"], "quantize": "nf4"},
}
IN_4_BITS = ("nf4", "dora nf4")
DENSE, WIDE, EXPERTS, CLASS = "dense", "wide", "experts", "class"
PARTS = {
    "bitfit": ("bias",),
    "prefix": (".prefix.",),
    "prompt": ("prompt.",),
    "p_tuning": ("prompt.",),
    "houlsby": ("_adapter.", "_norm."),
}
"""What the names of the tensors that are trained have, by kind; those of low-rank ones are told below."""
ON_DENSE = [kind for kind in KINDS if kind not in ("of experts", *IN_4_BITS)]
QUICK: list[tuple[str, str, dict[str, Any]]] = [
    ("dora", DENSE, {"tp": 2, "sequence": True}),
    ("prefix", DENSE, {"dp": 2, "zero": 3}),
    ("nf4", WIDE, {"tp": 2}),
]
REST: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, DENSE, {"dp": 2, "zero": zero}) for kind in ON_DENSE for zero in (0, 1, 2, 3)),
    *(
        (kind, DENSE, {"tp": 2, "sequence": sequence})
        for kind in ON_DENSE
        for sequence in (False, True)
        if not (sequence and kind in PROMPTS)
    ),
    *((kind, DENSE, {"pp": 2}) for kind in ON_DENSE),
    *((kind, DENSE, {"pp": 2, "schedule": "zbv", "recompute": "full"}) for kind in ("lora", "dora")),
    *((kind, DENSE, {"cp": 2}) for kind in ON_DENSE if kind not in ("prefix", *PROMPTS)),
    *((kind, DENSE, {"dp": 2, "zero": z, "engine": "deepspeed"}) for kind in ON_DENSE for z in (1, 2, 3)),
    *(
        (kind, EXPERTS, {"dp": 2, "ep": 2, "zero": zero})
        for kind in ("lora", "of experts")
        for zero in (0, 3)
    ),
    *(
        ("of experts", EXPERTS, layout)
        for layout in ({"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2})
    ),
    ("of experts", EXPERTS, {"tp": 2, "sequence": True}),
    ("of experts", EXPERTS, {"dp": 2, "zero": 2, "engine": "deepspeed"}),
    ("lora", EXPERTS, {"tp": 2}),
    ("dora", EXPERTS, {"pp": 2}),
    *((kind, CLASS, {"dp": 2, "zero": zero}) for kind in ("lora", "dora") for zero in (0, 1, 2, 3)),
    *(("lora", CLASS, {"dp": 2, "zero": zero, "engine": "deepspeed"}) for zero in (1, 3)),
    ("lora", CLASS, {"dp": 2, "recompute": "full"}),
    *(
        (kind, WIDE, layout)
        for kind in IN_4_BITS
        for layout in (
            *({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
            {"tp": 2, "sequence": True},
            {"pp": 2},
            {"cp": 2},
            {"dp": 2, "recompute": "selective"},
            {"pp": 2, "schedule": "zbv", "recompute": "full"},
        )
    ),
    ("prefix", EXPERTS, {"tp": 2, "sequence": True}),
    ("prompt", EXPERTS, {"pp": 2, "schedule": "zbv", "recompute": "full"}),
    ("houlsby", EXPERTS, {"tp": 2, "sequence": True}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        DENSE: save_dense(tmp_path_factory.mktemp(DENSE), 160),
        # 96 inputs of a rank's part of the second matrix: blocks of 64 are cut in the middle
        WIDE: save_dense(tmp_path_factory.mktemp(WIDE), 160, n_embd=64, n_inner=192),
        EXPERTS: save_experts(tmp_path_factory.mktemp(EXPERTS), 160),
        CLASS: save_class(tmp_path_factory.mktemp(CLASS), 160),
    }


def case_of(
    folders: dict[str, str], kind: str, model: str, layout: dict[str, Any], **more: Any
) -> dict[str, Any]:
    adapter = KINDS[kind] | (
        {"targets": ["*.attention.*"]} if model == EXPERTS and kind in ("lora", "dora") else {}
    )
    if model == CLASS:
        adapter |= {"targets": ["*_proj"]}
    found = Layout(**{"micro_batch": 2, **layout})
    fields = {"name": f"{kind} {model}", "model": f"hf:{folders[model]}", "changes": {}, "adapter": adapter}
    return {**fields, "steps": 3, "layout": found.to_json(), "id": f"{kind} {model} {found}", **more}


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "all"])
def test_an_adapter_is_the_same_under_every_layout(
    layouts: list[tuple[str, str, dict[str, Any]]],
    folders: dict[str, str],
    gang: ProcessGang,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Asked for in unsloth#2435."""
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    cases = [case_of(folders, *each) for each in layouts]
    alone = results.run_beside_one_process(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone[case["id"]]))
        parts = PARTS.get(case["adapter"]["kind"], ("lora_a", "lora_b", "magnitude.weight"))
        names = [n for n in results.of(case)["state"] if n.startswith("model.") and "router" not in n]
        assert names
        assert all(any(part in name for part in parts) for name in names)


@pytest.mark.slow
def test_a_commit_of_one_layout_goes_on_under_another(
    folders: dict[str, str], gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = Results(tmp_path_factory.mktemp("cases"), gang)
    through = case_of(folders, "dora", DENSE, {"tp": 2}, steps=4, id="through")
    half = case_of(folders, "dora", DENSE, {"tp": 2}, steps=2, id="half", commit=True)
    same = case_of(folders, "dora", DENSE, {"tp": 2}, steps=2, id="same", restore="half")
    other = case_of(folders, "dora", DENSE, {"dp": 2, "zero": 3}, steps=2, id="other", restore="half")
    results.run(2, [through, half, same, other])
    whole, first, second = results.of(through), results.of(half), results.of(same)
    joined = {k: first[k] + second[k] for k in ("losses", "norms")} | {"state": second["state"]}
    same_bits(joined, whole)
    assert results.of(other)["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)

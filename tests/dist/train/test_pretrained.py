"""Models that begin with weights of transformers, under every layout and both engines: what each rank reads is its part
of what one process reads, with rows for added tokens, and training goes the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from base_run import save_dense, save_experts
from harness import Results, check_equal, finished

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

ROWS = 150
"""Tokens in the checkpoint; the vocabulary of these tests has ten more."""
DENSE, EXPERTS = "dense", "experts"
QUICK: list[tuple[str, dict[str, Any]]] = [(DENSE, {"tp": 2}), (EXPERTS, {"dp": 2, "ep": 2, "zero": 3})]
REST: list[tuple[str, dict[str, Any]]] = [
    (DENSE, {"pp": 2}),
    *((DENSE, {"dp": 2, "zero": zero}) for zero in (1, 2, 3)),
    (EXPERTS, {"dp": 2, "ep": 2}),
    (EXPERTS, {"tp": 2}),
    (EXPERTS, {"pp": 2, "schedule": "zbv"}),
    *((DENSE, {"dp": 2, "zero": zero, "engine": "deepspeed"}) for zero in (1, 2, 3)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        DENSE: save_dense(tmp_path_factory.mktemp(DENSE), ROWS),
        EXPERTS: save_experts(tmp_path_factory.mktemp(EXPERTS), ROWS),
    }


@pytest.fixture(scope="module")
def results(gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("cases"), gang)


@pytest.fixture(scope="module")
def case_of(folders: dict[str, str]) -> Callable[..., dict[str, Any]]:
    def case(name: str, layout: dict[str, Any]) -> dict[str, Any]:
        found = Layout(**{"micro_batch": 2, **layout})
        fields = {"name": name, "model": f"hf:{folders[name]}", "changes": {}, "steps": 3}
        return {**fields, "layout": found.to_json(), "id": f"{name} {found}"}

    return case


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_layout_begins_and_goes_on_as_one_process(
    layouts: list[tuple[str, dict[str, Any]]], case_of: Callable[..., dict[str, Any]], results: Results
) -> None:
    cases = [case_of(*each) for each in layouts]
    alone = results.run_beside_one_process(2, cases)
    for case in cases:
        check_equal(results.of(case), results.of(alone[case["id"]]))


def test_what_is_not_new_is_that_of_the_checkpoint(
    folders: dict[str, str], case_of: Callable[..., dict[str, Any]], results: Results
) -> None:
    from safetensors.torch import load_file

    case = case_of(DENSE, {"tp": 2})
    results.run(2, [case])
    first, theirs = results.of(case)["first"], load_file(Path(folders[DENSE]) / "model.safetensors")
    table = first["model.tokens.weight"]
    assert torch.equal(table[:ROWS], theirs["transformer.wte.weight"])
    assert len(table) == ROWS + 10
    assert len({tuple(row.tolist()) for row in table[ROWS:]}) == 10
    fused = torch.cat(
        [first[f"model.layers.1.attention.{part}.weight"] for part in ("query", "key", "value")]
    )
    assert torch.equal(fused.t(), theirs["transformer.h.1.attn.c_attn.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_rank_holds_little_more_than_its_share_while_it_reads(
    layout: dict[str, Any], gang: ProcessGang, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = 16_000
    config = LlamaConfig(
        vocab_size=tokens, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    asked = {
        "model": f"hf:{tmp_path}",
        "changes": {},
        "tokens": tokens,
        "layout": {"micro_batch": 2, **layout},
    }
    for found in finished(2, asked, "rank_memory:main", gang):
        print(layout, found, found["peak"] / found["kept"])
        assert found["peak"] < 1.1 * found["kept"]

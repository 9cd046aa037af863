"""The weight of routers' losses is read and written so that all layers together weigh what they do in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workloads.hf.check.compare import load
from workloads.hf.check.parity_table import CASES, LENGTH, SIZE, VOCABULARY, Case, random_state
from workloads.hf.tables import router_weights
from workloads.hf.tables.families import family_of
from workloads.transformer_workload import TransformerWorkload

TITLES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "gpt-oss", "Switch")
SEEDED = [case for case in CASES if case.title in TITLES]


def used_alike(case: Case) -> TransformerWorkload:
    """With all scores equal and weights that are no round numbers."""
    config = case.config
    assert config.moe is not None
    moe = replace(config.moe, auxiliary=0.017, z_loss=0.003 if case.title == "Switch" else 0.0)
    return TransformerWorkload(case.model, replace(config, moe=moe), None, VOCABULARY)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", SEEDED, ids=lambda case: case.title)
def test_all_layers_together_weigh_what_they_do_in_transformers(case: Case, tmp_path: Path) -> None:
    workload = used_alike(case)
    state = random_state(workload)
    state = {name: torch.zeros_like(value) if ".router." in name else value for name, value in state.items()}
    workload.to_hf(state.__getitem__, str(tmp_path))
    model, theirs = workload.build().eval(), load(str(tmp_path))
    model.load_state_dict(state)
    tokens = torch.randint(3, SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model({"tokens": tokens, "decoder_tokens": tokens}).extra
        plain, whole = (
            theirs(input_ids=tokens, labels=tokens, output_router_logits=asked).loss
            for asked in (False, True)
        )
    assert own > 0
    assert float(whole - plain) == pytest.approx(float(own), rel=1e-3)
    again = family_of(workload.config).read_config(theirs.config)
    assert again.moe is not None
    assert again.moe.auxiliary == pytest.approx(0.017)
    written = family_of(workload.config).write_config(again)
    assert written["router_aux_loss_coef"] == theirs.config.router_aux_loss_coef


def test_every_family_with_routers_losses_is_compared() -> None:
    assert [case.title for case in SEEDED] == list(TITLES)


@pytest.mark.parametrize("weight", [0.001, 0.02, 0.9, 1 / 3])
def test_a_weight_is_written_as_it_was_read(weight: float) -> None:
    for layers, chosen in ((24, 4), (48, 8), (32, 2), (7, 3)):
        each = router_weights.of_each(weight, layers, chosen)
        assert router_weights.of_all(each, layers, chosen) == float(f"{weight:.12g}")

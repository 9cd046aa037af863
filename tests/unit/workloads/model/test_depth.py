"""How far parameters are from the output."""

from __future__ import annotations

import pytest

from workloads.model.depth import depth
from workloads.model.presets import preset
from workloads.transformer_workload import build_model

CASES = {
    "gpt-tiny": {"tokens.weight": 3, "layers.0.attention.query.weight": 2, "layers.1.feedforward.up.bias": 1,
                 "norm.weight": 0},
    "bert-tiny": {"tokens.weight": 3, "layers.1.attention_norm.weight": 1, "head.dense.weight": 0,
                  "sentence_head.output.weight": 0},
    "t5-tiny": {"tokens.weight": 5, "encoder.layers.0.feedforward_norm.weight": 4, "encoder.norm.weight": 3,
                "decoder.layers.1.cross_attention.key.weight": 1, "decoder.norm.weight": 0},
    "electra-tiny": {"tokens.weight": 3, "generator.layers.0.attention.key.weight": 2,
                     "discriminator.layers.1.attention.key.weight": 1, "discriminator.head.dense.weight": 0},
    "albert-tiny": {"tokens.weight": 2, "layers.0.attention.key.weight": 1, "head.dense.weight": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_heads_are_nearest_and_embeddings_farthest(name: str) -> None:
    config = preset(name)
    if not config.shared_layers:
        config = config.changed({"layers": 2})
    names = [each for each, _ in build_model(config).named_parameters()]
    for each, wanted in CASES[name].items():
        assert depth(config, each) == wanted, each
    top = CASES[name]["tokens.weight"]
    assert all(
        depth(config, each) == top for each in names if "embeddings." in each or "relative_bias" in each
    )
    assert {depth(config, each) for each in names} == set(range(top + 1))

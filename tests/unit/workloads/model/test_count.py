"""Numbers of parameters and FLOPs, against published sizes, what is built, and what transformers' classes multiply."""

from typing import Any

import pytest
import torch
from thin import every
from torch.utils.flop_counter import FlopCounterMode

from workloads.hf.tables.families import FAMILIES, family_of
from workloads.model.config import TransformerConfig
from workloads.model.count import flops, parameters
from workloads.model.presets import PRESETS, preset
from workloads.model.sparse import near
from workloads.predicted import ALL, Predicted
from workloads.transformer_workload import build_model

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    # transformers' BertForPreTraining, AlbertForPreTraining, RobertaForMaskedLM
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "albert-base": 11_813_810,
    "roberta-base": 124_697_433,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-v1.1-base": 247_577_856,
    "bart-base": 139_420_416,
    "switch-base-8": 619_339_008,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_models_have_their_published_size(name: str, count: int) -> None:
    assert parameters(preset(name)) == count


@pytest.mark.parametrize("name", PRESETS)
def test_the_closed_form_counts_what_is_built(name: str) -> None:
    with torch.device("meta"):
        built = sum(p.numel() for p in build_model(preset(name)).parameters())
    assert parameters(preset(name)) == built


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-tiny", {"tied": False, "embedding_size": 64}),
        ("gpt-tiny", {"tied": False, "head_bias": True}),
    ],
)
def test_the_closed_form_counts_what_the_head_multiplies(name: str, changes: dict[str, Any]) -> None:
    config = preset(name).changed(changes)
    with torch.device("meta"):
        built = sum(p.numel() for p in build_model(config).parameters())
    assert parameters(config) == built


@pytest.mark.parametrize(
    "changes",
    [
        {"head": "sequence", "classes": 3, "sentence_head": False},
        {"head": "token", "classes": 5, "sentence_head": False},
        {"head": "span", "classes": 2, "sentence_head": False},
        {"head": "none"},
        {"tied": False},
        {"embedding_size": 24},
        {"positions": "sinusoidal"},
        {"positions": "rotary", "qk_norm": True},
    ],
)
def test_the_closed_form_follows_the_options(changes: dict) -> None:
    config = preset("bert-tiny").changed(changes)
    with torch.device("meta"):
        built = sum(p.numel() for p in build_model(config).parameters())
    assert parameters(config) == built


def test_active_parameters_are_those_one_token_meets() -> None:
    # Mixtral of Experts, section 2.1: 13 B of 47 B; DeepSeek-V3, section 2.1: 37 B of 671 B.
    assert round(parameters(preset("mixtral-8x7b"), active=True) / 1e9, 1) == 12.9
    assert round(parameters(preset("deepseek-v3"), active=True) / 1e9, 1) == 37.6
    # gpt-oss model card, table 1: active ones without the embedding table, which is not multiplied.
    for name, total, active in (("gpt-oss-20b", 20.91, 3.61), ("gpt-oss-120b", 116.83, 5.13)):
        config = preset(name)
        table = config.vocab_size * config.hidden
        assert round(parameters(config) / 1e9, 2) == total
        assert round((parameters(config, active=True) - table) / 1e9, 2) == active
    assert parameters(preset("gpt2"), active=True) == parameters(preset("gpt2"))


def test_flops_are_palms_formula() -> None:
    config, length = preset("gpt2"), 1024
    multiplied = parameters(config) - 1024 * 768  # positions are looked up; the tied table is the output
    norms = multiplied  # norms and biases count as weights
    attention = 12 * 12 * 12 * 64 * length
    assert flops(config, length) == pytest.approx(6 * norms + attention, rel=1e-3)


def test_flops_of_a_pair_depend_on_what_is_written() -> None:
    config = preset("t5-base")
    few, as_many = (Predicted(target_length=length) for length in (128, 512))
    assert flops(config, 512, as_many) > flops(config, 512, few) > flops(config, 512, as_many) / 2
    assert flops(config, 512) == flops(config, 512, as_many)


def test_flops_count_shared_layers_each_time_and_experts_by_use() -> None:
    shared, own = preset("albert-tiny"), preset("albert-tiny").changed({"shared_layers": False})
    assert flops(shared, 64) == flops(own, 64)
    dense = preset("mixtral-tiny").changed({"moe": {"experts": 4, "top_k": 2}})
    more = dense.changed({"moe": {"experts": 8}})
    assert flops(more, 64) - flops(dense, 64) == 6 * 2 * 4 * 64  # two layers' larger routers


ROWS, LENGTH, TARGET = 32, 64, 32
SMALL: dict[str, Any] = {
    "vocab_size": 2000, "hidden": 256, "layers": 2, "heads": 4, "intermediate": 768, "max_positions": 128,
    "kv_heads": 0, "head_dim": 0, "embedding_size": 0, "rope_scaling": None,
}  # fmt: skip
EXPERTS = {"experts": 4, "top_k": 2, "intermediate": 256}
LATENT = {"query_rank": 96, "key_value_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
CASES: dict[str, dict[str, Any]] = {
    "xlnet-base": {},
    "deberta-v3-base": {"disentangled": 32, "relative_distance": 64},
    "bert-base": {},
    "electra-base": {"generator": 64},
    "albert-base": {"embedding_size": 64},
    "t5-base": {"decoder_layers": 3},
    "deepseek-v3": {
        "latent": LATENT,
        "head_dim": 48,
        "moe": {**EXPERTS, "first": 1, "groups": 2, "top_groups": 1},
    },
    "gpt-oss-20b": {"window": LENGTH, "kv_heads": 2, "moe": {**EXPERTS, "intermediate": 768}},
    "switch-base-8": {
        "decoder_layers": 2,
        "moe": {"experts": 4, "intermediate": 768, "capacity_factor": None, "capacity": LENGTH},
    },
    "qwen1.5-moe-a2.7b": {"moe": {**EXPERTS, "shared": 2}},
    "qwen3-30b-a3b": {"kv_heads": 2, "head_dim": 48, "moe": EXPERTS},
    "mixtral-8x7b": {"kv_heads": 2, "moe": EXPERTS},
    "gpt2": {},
    "llama-3-8b": {"kv_heads": 2},
    "qwen3-8b": {"kv_heads": 2},
    "qwen2-7b": {"kv_heads": 2},
    "mistral-7b": {"kv_heads": 2, "window": LENGTH},
    "phi-3-mini": {"window": LENGTH},
    "olmo-2-7b": {},
    "gemma-2-2b": {"kv_heads": 2, "window": LENGTH},
    "gemma-3-1b": {"kv_heads": 1, "window": LENGTH},
    "roberta-base": {},
    "xlm-roberta-base": {},
    "distilbert-base": {},
    "ernie-1.0-base": {},
    "mpnet-base": {},
    "mt5-small": {"decoder_layers": 3},
    "bart-base": {"decoder_layers": 3},
    "mbart-large": {"decoder_layers": 3},
    "pegasus-large": {"decoder_layers": 3},
}
"""A preset of each family, made small enough to be run and wide enough that biases and norms are below 0.5 %."""


def multiplied(config: TransformerConfig, kind: str = "") -> float:
    """Return three times the FLOPs that a forward pass of transformers' class multiplies, per token that it reads."""
    import transformers

    family = family_of(config)
    fields = family.write_config(config) | {"pad_token_id": 1}
    hf_config = transformers.CONFIG_MAPPING[family.model_type](**fields)
    # Fused kernels and grouped products are no products to the counter.
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    model = getattr(transformers, kind or family.head(config).kind)(hf_config).eval()
    pair = {"decoder_input_ids": torch.full((ROWS, TARGET), 7)} if config.decoder_layers else {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((ROWS, LENGTH), 7), **pair)
    return 3 * counter.get_total_flops() / (ROWS * LENGTH)


def test_every_family_is_counted() -> None:
    assert sorted({preset(name).family for name in CASES}) == sorted(FAMILIES)


@pytest.mark.parametrize("name", every(5, CASES))
def test_flops_are_those_of_transformers_class(name: str) -> None:
    config = preset(name).changed(SMALL | CASES[name])
    if config.generator:
        alone, generator = config.changed({"generator": 0}), config.generator_config()
        theirs = multiplied(alone) + multiplied(generator, "ElectraForMaskedLM")
    else:
        theirs = multiplied(config)
    if config.positions == "relative_keys":
        # transformers projects the vectors of all 2 L distances for each row, this model once for all rows.
        theirs -= 3 * config.layers * 2 * 2 * config.hidden**2
    predicted = Predicted(target_length=TARGET) if config.decoder_layers else ALL
    assert flops(config, LENGTH, predicted) == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [{}, {"window_dilation": 3}, {"global_tokens": 4}, {"random_blocks": 2, "block_size": 16}],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny"])
def test_a_window_counts_the_keys_that_a_query_sees(name: str, changes: dict[str, int]) -> None:
    """An encoder sees those on both sides. A causal row counts as if no key were masked at its beginning."""
    length, whole = 512, preset(name)
    config = whole.changed({"window": 16, **changes})
    steps = torch.arange(length)
    allowed = near(config, steps[:, None], steps[None], length)
    seen = (allowed & (steps[:, None] >= steps)).sum(1)[-64:] if config.causal else allowed.sum(1)
    scores = 12 * config.layers * config.heads * config.head_dim
    counted = length + (flops(config, length) - flops(whole, length)) / scores
    assert counted == pytest.approx(seen.float().mean().item(), rel=0.06)

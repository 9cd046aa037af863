"""Configurations: counts, derived sizes, and what is refused."""

import subprocess
import sys

import pytest
import torch

from workloads.describe import describe, for_objective
from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS, preset
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
    assert preset(name).parameters() == count


@pytest.mark.parametrize("name", PRESETS)
def test_the_closed_form_counts_what_is_built(name: str) -> None:
    with torch.device("meta"):
        built = sum(p.numel() for p in build_model(preset(name)).parameters())
    assert preset(name).parameters() == built


@pytest.mark.parametrize(
    "changes",
    [
        {"head": "sequence", "classes": 3, "sentence_head": False},
        {"head": "token", "classes": 5, "sentence_head": False},
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
    assert config.parameters() == built


def test_active_parameters_are_those_one_token_meets() -> None:
    # Mixtral of Experts, section 2.1: 13 B of 47 B; DeepSeek-V3, section 2.1: 37 B of 671 B.
    assert round(preset("mixtral-8x7b").active_parameters() / 1e9, 1) == 12.9
    assert round(preset("deepseek-v3").active_parameters() / 1e9, 1) == 37.6
    assert preset("gpt2").active_parameters() == preset("gpt2").parameters()


def test_flops_are_palms_formula() -> None:
    config, length = preset("gpt2"), 1024
    multiplied = config.parameters() - 1024 * 768  # positions are looked up; the tied table is the output
    norms = multiplied  # norms and biases count as weights
    attention = 12 * 12 * 12 * 64 * length
    assert config.flops(length) == pytest.approx(6 * norms + attention, rel=1e-3)


def test_flops_of_a_pair_depend_on_what_is_written() -> None:
    config = preset("t5-base")
    assert config.flops(512, 512) > config.flops(512, 128) > config.flops(512, 128) / 2
    assert config.flops(512) == config.flops(512, 512)


def test_flops_count_shared_layers_each_time_and_experts_by_use() -> None:
    shared, own = preset("albert-tiny"), preset("albert-tiny").changed({"shared_layers": False})
    assert shared.flops(64) == own.flops(64)
    dense = preset("mixtral-tiny").changed({"moe": {"experts": 4, "top_k": 2}})
    more = dense.changed({"moe": {"experts": 8}})
    assert more.flops(64) - dense.flops(64) == 6 * 2 * 4 * 64  # two layers' larger routers


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(WorkloadError, match="gpt2-xl"):
        preset("gpt2-xxl")
    with pytest.raises(WorkloadError, match="bert-base"):
        describe("bert_base")


def test_changes_derive_sizes_anew() -> None:
    config = describe("gpt-tiny", {"hidden": 96, "heads": 6}, 300)
    assert (config.head_dim, config.kv_heads, config.embedding_size, config.vocab_size) == (16, 6, 96, 300)
    assert describe("t5-tiny", {"layers": 3}).decoder_layers == 3
    assert describe("qwen3-0.6b", {"layers": 2}).head_dim == 128
    assert describe("mixtral-tiny", {"moe": {"experts": 16}}).moe.top_k == 2


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("gpt-tiny", {"hiden": 3}, "unknown model field 'hiden'"),
        ("gpt-tiny", {"heads": 3}, "hidden 128 is no multiple of heads 3"),
        ("llama-tiny", {"kv_heads": 3}, "no multiple of kv_heads 3"),
        ("gpt-tiny", {"norm": "batch"}, "use one of layer, rms"),
        ("gpt-tiny", {"layers": 0}, "layers is 0"),
        ("gpt-tiny", {"window": 0, "global_tokens": 2}, "set window"),
        ("gpt-tiny", {"rope_scaling": {"kind": "linear", "factor": 2.0}}, "learned"),
        ("gpt-tiny", {"decoder_layers": 2}, "has no decoder_layers"),
        ("gpt-tiny", {"embedding_size": 16}, "a tied language head"),
        ("gpt-tiny", {"head": "sequence"}, "needs classes"),
        ("gpt-tiny", {"sentence_head": True}, "use an encoder"),
        ("gpt-tiny", {"block_positions": True, "positions": "rotary"}, "needs learned positions"),
        ("bert-tiny", {"generator": 32}, "head: discriminator"),
        ("albert-tiny", {"moe": {"experts": 2, "top_k": 1, "intermediate": 8}}, "shared_layers needs"),
        ("mixtral-tiny", {"moe": {"top_k": 5}}, "moe.top_k is 5"),
        ("mixtral-tiny", {"moe": {"groups": 3}}, "choose moe.groups"),
        ("mixtral-tiny", {"moe": {"gate": "hard"}}, "use softmax or sigmoid"),
        ("mixtral-tiny", {"moe": {"capacity_factor": 0.0}}, "must be positive"),
        ("mixtral-tiny", {"moe": {"expert": 3}}, "unknown field moe.expert"),
        ("gpt-tiny", {"moe": {"experts": 3}}, "moe is incomplete"),
        ("llama-tiny", {"rope_scaling": {"kind": "cubic", "factor": 2.0, "original_positions": 8}}, "linear"),
        ("llama-tiny", {"rope_scaling": {"kind": "llama3", "factor": 2.0}}, "for llama3 and yarn"),
        (
            "llama-tiny",
            {"rope_scaling": {"kind": "yarn", "factor": 0.5, "original_positions": 8}},
            "at least 1",
        ),
        ("deepseek-v3-tiny", {"qk_norm": True}, "latent attention has neither"),
        ("t5-tiny", {"head": "masked"}, "set head: language"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(model: str, changes: dict, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        describe(model, changes)


def test_heads_follow_the_objective() -> None:
    bert = preset("bert-tiny")
    assert not for_objective(bert, "masked_lm").sentence_head
    assert for_objective(bert, "next_sentence").sentence_head
    assert for_objective(preset("roberta-tiny"), "next_sentence").token_types == 2
    assert for_objective(preset("electra-tiny"), "masked_lm").head == "masked"
    assert for_objective(preset("electra-tiny"), "replaced_token_detection").generator == 32
    assert for_objective(bert, "sequence_classification").classes == 2
    assert for_objective(preset("gpt-tiny"), "causal_lm") == preset("gpt-tiny")
    with pytest.raises(WorkloadError, match="needs a generator"):
        for_objective(bert, "replaced_token_detection")


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from workloads.describe import describe; c = describe('mixtral-8x7b', {}, 100);"
        "c.parameters(); c.flops(128); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configurations_are_values() -> None:
    assert preset("gpt2") == TransformerConfig(
        family="gpt2",
        architecture="decoder",
        vocab_size=50257,
        hidden=768,
        layers=12,
        heads=12,
        intermediate=3072,
        max_positions=1024,
        activation="gelu_tanh",
        residual_scaling=True,
    )
    assert hash(preset("deepseek-v3")) == hash(preset("deepseek-v3").changed({}))

"""Configurations: derived sizes, and what is refused."""

import subprocess
import sys

import pytest
from transformers import LlamaConfig

from workloads.describe import describe, for_objective
from workloads.errors import WorkloadError
from workloads.hf.tables.decoders import read_rope
from workloads.model.config import TransformerConfig
from workloads.model.presets import preset


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
    "theirs",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0,
         "mscale_all_dim": 0.8, "truncate": False},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256, "low_freq_factor": 1.0,
         "high_freq_factor": 2.0},
        {"rope_type": "default"},
    ],
    ids=["linear", "yarn", "yarn with mscale", "llama3", "default"],
)  # fmt: skip
def test_positions_may_have_the_names_of_transformers(theirs: dict) -> None:
    """They mean what they mean in a config.json of transformers, as its own class reads it."""
    config = LlamaConfig(rope_parameters={**theirs, "rope_theta": 5e5}, max_position_embeddings=2048)
    wanted = read_rope(config)
    for name in ("rope_scaling", "rope_parameters"):
        changes = {"max_position_embeddings": 2048, name: {**theirs, "rope_theta": 5e5}}
        found = describe("llama-tiny", changes)
        assert (found.max_positions, found.rope_theta) == (2048, wanted["rope_theta"])
        assert found.rope_scaling == wanted["rope_scaling"]
    older = {"type" if key == "rope_type" else key: value for key, value in theirs.items()}
    assert describe("llama-tiny", {"rope_scaling": older}).rope_scaling == wanted["rope_scaling"]


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("gpt-tiny", {"hiden": 3}, "unknown model field 'hiden'"),
        ("gpt-tiny", {"hidden": "many"}, "hidden should be a whole number, but is 'many'"),
        ("gpt-tiny", {"layers": 1.5}, "layers should be a whole number, but is 1.5"),
        ("gpt-tiny", {"heads": True}, "heads should be a whole number, but is True"),
        ("gpt-tiny", {"norm_eps": float("nan")}, "norm_eps should be a number, but is nan"),
        ("gpt-tiny", {"tied": 1}, "tied should be true or false, but is 1"),
        ("gpt-tiny", {"positions": 3}, "positions should be a text, but is 3"),
        ("mixtral-tiny", {"moe": {"experts": 2.0}}, r"moe.experts should be a whole number, but is 2.0"),
        ("gpt-tiny", {"layers": 10**6}, "layers is 1000000; give at most 10000"),
        ("gpt-tiny", {"heads": 3}, "hidden 128 is not a multiple of heads 3"),
        ("llama-tiny", {"kv_heads": 3}, "not a multiple of kv_heads 3"),
        ("gpt-tiny", {"norm": "batch"}, "use one of layer, rms"),
        ("gpt-tiny", {"layers": 0}, "layers is 0"),
        ("gpt-tiny", {"window": 0, "global_tokens": 2}, "set window"),
        ("bert-tiny", {"random_blocks": 2}, "random_blocks does nothing without window"),
        ("bert-tiny", {"window": 4, "window_dilation": 0}, "window_dilation is 0; give at least 1"),
        ("bert-tiny", {"window": 4, "random_blocks": 1, "block_size": 0}, "block_size is 0"),
        ("gpt-tiny", {"rope_scaling": {"kind": "linear", "factor": 2.0}}, "learned"),
        ("gpt-tiny", {"decoder_layers": 2}, "has no decoder_layers"),
        ("t5-tiny", {"embedding_size": 16}, "leave out embedding_size and head_bias"),
        ("bart-tiny", {"head_bias": True}, "leave out embedding_size and head_bias"),
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
        (
            "llama-tiny",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "give the length of the original",
        ),
        (
            "llama-tiny",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "use linear, llama3 or yarn",
        ),
        (
            "llama-tiny",
            {"rope_scaling": {"type": "linear", "kind": "linear", "factor": 2.0}},
            "kind is given twice",
        ),
        ("llama-tiny", {"max_positions": 8, "max_position_embeddings": 8}, "max_positions is given twice"),
        ("llama-tiny", {"rope_scaling": {"kind": "cubic", "factor": 2.0, "original_positions": 8}}, "linear"),
        ("llama-tiny", {"rope_scaling": {"kind": "llama3", "factor": 2.0}}, "kind llama3 needs"),
        (
            "llama-tiny",
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "original_positions": 8}},
            "for llama3 and yarn; leave it out",
        ),
        (
            "llama-tiny",
            {"rope_scaling": {"kind": "yarn", "factor": 0.5, "original_positions": 8}},
            "at least 1",
        ),
        ("deepseek-v3-tiny", {"qk_norm": True}, "latent attention has no qk_norm"),
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
        "import sys; from workloads.describe import describe, flops, parameters; c = describe('mixtral-8x7b', {}, 100);"
        "parameters(c); flops(c, 128); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
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

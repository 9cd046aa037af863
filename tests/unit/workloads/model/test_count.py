"""Numbers of parameters and FLOPs, against published sizes and what is built."""

import pytest
import torch

from workloads.model.count import flops, parameters
from workloads.model.presets import PRESETS, preset
from workloads.predicted import Predicted
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

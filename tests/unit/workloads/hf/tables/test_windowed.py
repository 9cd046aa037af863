"""What a table cannot express is refused by it in one line, and run as the class of transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.convert.folder import check, describe_folder
from workloads.hf.tables.families import by_model_type
from workloads.model.config import TransformerConfig

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
ENCODER = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 6,
           "norm_rel_ebd": "layer_norm"}  # fmt: skip
FULL, NEAR = "full_attention", "sliding_attention"
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
UNKNOWN: dict[str, tuple[Any, str]] = {
    "windows in no order": (
        transformers.Gemma2Config(**SIZES, head_dim=8, layer_types=[FULL, NEAR, NEAR]), "layer_types of gemma2"),
    "windows in the last layers": (
        transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "layer_types"),
    "both directions": (
        transformers.Gemma2Config(**SIZES, head_dim=8, use_bidirectional_attention=True), "sees later tokens"),
    "the soft cap of scores that transformers leaves out": (
        transformers.Gemma3TextConfig(**SIZES, head_dim=8, layer_types=[NEAR, FULL, NEAR], attn_logit_softcapping=9.0),
        "attn_logit_softcapping 9.0"),
    "windows alone": (
        transformers.Gemma3TextConfig(**SIZES, head_dim=8, layer_types=[NEAR] * 3), "has no order of both kinds"),
    "windows with scaled rotary": (
        transformers.Gemma3TextConfig(**SIZES, head_dim=8, layer_types=[NEAR, NEAR, FULL], rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 1e6},
            NEAR: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        "positions of windows are scaled"),
    "rotary by length": (
        transformers.Phi3Config(**SIZES, pad_token_id=1, rope_parameters=LONG), "rope type 'longrope'"),
    "a part of the head is rotated": (
        transformers.Phi3Config(**SIZES, pad_token_id=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                                          "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5"),
    "layers without experts": (
        transformers.Qwen3MoeConfig(
            **SIZES, mlp_only_layers=[1], moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
        "mlp_only_layers"),
    "a shared expert of another width": (
        transformers.Qwen2MoeConfig(
            **SIZES, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4),
        "not a multiple of moe_intermediate_size 16"),
    "gpt-oss with windows in no order": (
        transformers.GptOssConfig(**SIZES, head_dim=8, layer_types=[FULL, NEAR, NEAR]), "layer_types of gpt_oss"),
    "gpt-oss with another activation": (
        transformers.GptOssConfig(**SIZES, head_dim=8, hidden_act="gelu"), "hidden_act 'gelu' of gpt_oss"),
    "gpt-oss with rotary by length": (
        transformers.GptOssConfig(**SIZES, head_dim=8, rope_parameters=LONG), "rope type 'longrope'"),
    "gpt-oss that rotates a part of the head": (
        transformers.GptOssConfig(**SIZES, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                                        "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5"),
    "other buckets of distances than the class computes": (
        transformers.MPNetConfig(**ENCODER, relative_attention_num_buckets=64), "relative_attention_num_buckets 64"),
    **{
        f"deberta-v2 with {name} {value!r}": (
            transformers.DebertaV2Config(**ENCODER | DEBERTA | {name: value}), f"{name}|no position_buckets")
        for name, value in (
            ("relative_attention", False), ("pos_att_type", ["c2p"]), ("share_att_key", False),
            ("norm_rel_ebd", "none"), ("conv_kernel_size", 3), ("embedding_size", 16), ("attention_head_size", 4),
            ("pooler_hidden_size", 16), ("position_buckets", -1), ("legacy", False))
    },
    "an unknown activation": (transformers.MPNetConfig(**ENCODER, hidden_act="tanh"), "activation 'tanh' of mpnet"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_table_cannot_express_is_run_as_the_class_of_transformers(name: str, tmp_path: Path) -> None:
    hf_config, why = UNKNOWN[name]
    family = by_model_type(hf_config.model_type)
    assert family is not None
    with pytest.raises(WorkloadError, match=why) as told:
        check(family, family.read_config(hf_config), hf_config)
    assert "\n" not in str(told.value)
    hf_config.save_pretrained(tmp_path)
    assert isinstance(describe_folder(str(tmp_path)), HuggingFaceModel)


def test_windows_in_every_layer_and_in_some_are_read(tmp_path: Path) -> None:
    def read(hf_config: Any) -> tuple[int, int]:
        hf_config.save_pretrained(tmp_path)
        config = describe_folder(str(tmp_path))
        assert isinstance(config, TransformerConfig)
        return config.window, config.full_every

    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    assert read(transformers.Gemma2Config(**SIZES, head_dim=8)) == (4096, 2)
    assert read(transformers.Gemma2Config(**SIZES, head_dim=8, layer_types=[NEAR, NEAR, FULL])) == (4096, 3)
    assert read(transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window_pattern=3)) == (4096, 3)
    assert read(transformers.Qwen2Config(**SIZES, **sliding)) == (5, 0)
    assert read(transformers.Qwen2Config(**SIZES)) == (0, 0)
    assert read(transformers.MistralConfig(**SIZES, sliding_window=None)) == (0, 0)

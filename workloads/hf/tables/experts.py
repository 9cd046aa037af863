"""Conversion tables of the decoders with experts: Mixtral, DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables import router_weights
from workloads.hf.tables.decoders import BODY, FIELDS, GATED, GROUPED, decoder_heads, read_rope, write_rope
from workloads.hf.tables.family import Family, Row, both, one
from workloads.model.config import TransformerConfig
from workloads.model.parts import LatentAttention, MoE
from workloads.model.presets import PRESETS


def _read_mixtral(hf_config: Any) -> dict[str, Any]:
    base = PRESETS["mixtral-8x7b"].moe
    assert base is not None
    moe = replace(
        base,
        experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate=hf_config.intermediate_size,
        auxiliary=router_weights.of_each(
            hf_config.router_aux_loss_coef, hf_config.num_hidden_layers, hf_config.num_experts_per_tok
        ),
    )
    window = hf_config.sliding_window or 0
    return read_rope(hf_config) | {"moe": moe, "window": window}


def _write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    moe = moe_of(config)
    if not moe.normalise or moe.gate != "softmax" or moe.shared or moe.every > 1 or moe.first:
        raise WorkloadError(
            "Mixtral needs normalised softmax routing in every layer, without shared experts; set moe.gate: softmax, "
            "moe.normalise: true, moe.shared: 0, moe.every: 1 and moe.first: 0, or checkpoint.export to null"
        )
    return write_rope(config) | {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.intermediate,
        "router_aux_loss_coef": router_weights.of_all(moe.auxiliary, config.layers, moe.top_k),
        "sliding_window": config.window or None,
    }


def moe_of(config: TransformerConfig) -> MoE:
    """Return the experts of the model. Raises WorkloadError if it has none."""
    if config.moe is None:
        raise WorkloadError(f"{config.family} needs moe; give moe or choose a class without experts")
    return config.moe


_MIXTRAL_EXPERT = "model.layers.{n}.block_sparse_moe.experts.{e}."
MIXTRAL = Family(
    model_type="mixtral",
    base=PRESETS["mixtral-8x7b"],
    prefix="model.",
    fields=FIELDS,
    constants={"attention_dropout": 0.0},
    reads=_read_mixtral,
    writes=_write_mixtral,
    rows=(
        *BODY,
        *GROUPED,
        *one("layers.{n}.feedforward.router.weight", "model.layers.{n}.block_sparse_moe.gate.weight"),
        *one("layers.{n}.feedforward.experts.gate", _MIXTRAL_EXPERT + "w1.weight"),
        *one("layers.{n}.feedforward.experts.up", _MIXTRAL_EXPERT + "w3.weight"),
        *one("layers.{n}.feedforward.experts.down", _MIXTRAL_EXPERT + "w2.weight"),
    ),
    heads=decoder_heads("Mixtral"),
)


def _pairs(start: int, width: int) -> list[int]:
    """Return the order that turns interleaved rotary pairs (0, 1), (2, 3) into halves (0, 2, ..), (1, 3, ..)."""
    return [*range(start, start + width, 2), *range(start + 1, start + width, 2)]


def _query_order(config: TransformerConfig) -> list[int]:
    latent = _latent(config)
    size = latent.nope_dim + latent.rope_dim
    order: list[int] = []
    for head in range(config.heads):
        start = head * size
        order += [*range(start, start + latent.nope_dim), *_pairs(start + latent.nope_dim, latent.rope_dim)]
    return order


def _latent_order(config: TransformerConfig) -> list[int]:
    latent = _latent(config)
    return [*range(latent.key_value_rank), *_pairs(latent.key_value_rank, latent.rope_dim)]


def _latent(config: TransformerConfig) -> LatentAttention:
    assert config.latent is not None
    return config.latent


def _read_deepseek(hf_config: Any) -> dict[str, Any]:
    if not hf_config.rope_interleave:
        raise WorkloadError("this DeepSeek has no interleaved rotary pairs; set rope_interleave: true")
    if hf_config.num_key_value_heads != hf_config.num_attention_heads:
        raise WorkloadError(
            "DeepSeek-V3 of transformers has as many key as query heads; set num_key_value_heads to "
            f"{hf_config.num_attention_heads}"
        )
    base = PRESETS["deepseek-v3"].moe
    assert base is not None
    moe = replace(
        base,
        experts=hf_config.n_routed_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate=hf_config.moe_intermediate_size,
        first=hf_config.first_k_dense_replace,
        shared=hf_config.n_shared_experts,
        normalise=hf_config.norm_topk_prob,
        scale=hf_config.routed_scaling_factor,
        groups=hf_config.n_group,
        top_groups=hf_config.topk_group,
    )
    latent = LatentAttention(
        hf_config.q_lora_rank or 0,
        hf_config.kv_lora_rank,
        hf_config.qk_nope_head_dim,
        hf_config.qk_rope_head_dim,
        hf_config.v_head_dim,
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return read_rope(hf_config) | {
        "moe": moe,
        "latent": latent,
        "head_dim": head_dim,
        "output_bias": hf_config.attention_bias,
    }


def _write_deepseek(config: TransformerConfig) -> dict[str, Any]:
    moe = moe_of(config)
    latent = _latent(config)
    if moe.gate != "sigmoid" or not moe.shared or moe.every > 1 or moe.bias_rate is None:
        raise WorkloadError(
            "DeepSeek-V3 needs sigmoid routing with a bias and shared experts, in every layer from moe.first on; set "
            "moe.gate: sigmoid, moe.bias_rate, moe.shared and moe.every: 1, or checkpoint.export to null"
        )
    return write_rope(config) | {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate,
        "first_k_dense_replace": moe.first,
        "n_shared_experts": moe.shared,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "num_nextn_predict_layers": 0,
    }


_DEEPSEEK_ATTENTION = "model.layers.{n}.self_attn."
_DEEPSEEK_MLP = "model.layers.{n}.mlp."
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    base=PRESETS["deepseek-v3"],
    prefix="model.",
    fields={k: v for k, v in FIELDS.items() if k != "head_dim"} | {"attention_bias": "attention_bias"},
    constants={"attention_dropout": 0.0, "rope_interleave": True},
    reads=_read_deepseek,
    writes=_write_deepseek,
    rows=(
        *BODY,
        *GATED,
        *both("layers.{n}.attention.query_down", _DEEPSEEK_ATTENTION + "q_a_proj"),
        *both("layers.{n}.attention.query_norm", _DEEPSEEK_ATTENTION + "q_a_layernorm"),
        Row(("layers.{n}.attention.query_up.weight",), _DEEPSEEK_ATTENTION + "q_b_proj.weight",
            order=_query_order),
        Row(("layers.{n}.attention.query.weight",), _DEEPSEEK_ATTENTION + "q_proj.weight", order=_query_order),
        Row(("layers.{n}.attention.latent_down.weight",), _DEEPSEEK_ATTENTION + "kv_a_proj_with_mqa.weight",
            order=_latent_order),
        Row(("layers.{n}.attention.latent_down.bias",), _DEEPSEEK_ATTENTION + "kv_a_proj_with_mqa.bias",
            order=_latent_order),
        *both("layers.{n}.attention.latent_norm", _DEEPSEEK_ATTENTION + "kv_a_layernorm"),
        *both("layers.{n}.attention.key_value", _DEEPSEEK_ATTENTION + "kv_b_proj"),
        *one("layers.{n}.feedforward.router.weight", _DEEPSEEK_MLP + "gate.weight"),
        *one("layers.{n}.feedforward.router.bias", _DEEPSEEK_MLP + "gate.e_score_correction_bias"),
        *one("layers.{n}.feedforward.experts.gate", _DEEPSEEK_MLP + "experts.{e}.gate_proj.weight"),
        *one("layers.{n}.feedforward.experts.up", _DEEPSEEK_MLP + "experts.{e}.up_proj.weight"),
        *one("layers.{n}.feedforward.experts.down", _DEEPSEEK_MLP + "experts.{e}.down_proj.weight"),
        *both("layers.{n}.feedforward.shared.gate", _DEEPSEEK_MLP + "shared_experts.gate_proj"),
        *both("layers.{n}.feedforward.shared.up", _DEEPSEEK_MLP + "shared_experts.up_proj"),
        *both("layers.{n}.feedforward.shared.down", _DEEPSEEK_MLP + "shared_experts.down_proj"),
    ),
    heads=decoder_heads("DeepseekV3"),
)  # fmt: skip

"""Conversion tables of Qwen's mixture-of-experts decoders: Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables import router_weights
from workloads.hf.tables.decoders import BODY, GATED, GROUPED, QWEN3, decoder_heads, read_rope, write_rope
from workloads.hf.tables.experts import moe_of
from workloads.hf.tables.family import Family, both, one
from workloads.hf.tables.windowed import NO_HEAD_DIM
from workloads.model.config import TransformerConfig
from workloads.model.parts import MoE
from workloads.model.presets import PRESETS

_MLP = "model.layers.{n}.mlp."
_EXPERTS = (
    *one("layers.{n}.feedforward.router.weight", _MLP + "gate.weight"),
    *one("layers.{n}.feedforward.experts.gate", _MLP + "experts.{e}.gate_proj.weight"),
    *one("layers.{n}.feedforward.experts.up", _MLP + "experts.{e}.up_proj.weight"),
    *one("layers.{n}.feedforward.experts.down", _MLP + "experts.{e}.down_proj.weight"),
)


def _read_moe(hf_config: Any) -> MoE:
    if hf_config.use_sliding_window or hf_config.mlp_only_layers:
        raise WorkloadError(
            f"this {hf_config.model_type} has windows or mlp_only_layers, which are not supported here; "
            "turn them off"
        )
    step = hf_config.decoder_sparse_step
    moe = MoE(
        experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate=hf_config.moe_intermediate_size,
        every=step,
        first=step - 1,
        normalise=hf_config.norm_topk_prob,
    )
    routed = moe.routed(hf_config.num_hidden_layers)
    return replace(moe, auxiliary=router_weights.of_each(hf_config.router_aux_loss_coef, routed, moe.top_k))


def _write_moe(config: TransformerConfig) -> dict[str, Any]:
    moe = moe_of(config)
    if moe.gate != "softmax" or moe.first != moe.every - 1 or bool(moe.shared) != moe.shared_gate:
        raise WorkloadError(
            "Qwen's experts have softmax routing, in every n-th layer, and shared ones have a gate; "
            "set moe.gate, moe.first to moe.every - 1, and moe.shared_gate"
        )
    return write_rope(config) | {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate,
        "decoder_sparse_step": moe.every,
        "norm_topk_prob": moe.normalise,
        "router_aux_loss_coef": router_weights.of_all(moe.auxiliary, moe.routed(config.layers), moe.top_k),
    }


def _read_qwen2_moe(hf_config: Any) -> dict[str, Any]:
    shared, rest = divmod(hf_config.shared_expert_intermediate_size, hf_config.moe_intermediate_size)
    if rest or not shared:
        raise WorkloadError(
            f"shared_expert_intermediate_size {hf_config.shared_expert_intermediate_size} is not a multiple of "
            f"moe_intermediate_size {hf_config.moe_intermediate_size}, which is not supported here; "
            "use another checkpoint"
        )
    moe = replace(_read_moe(hf_config), shared=shared, shared_gate=True)
    return read_rope(hf_config) | {"moe": moe, "attention_bias": hf_config.qkv_bias}


def _write_qwen2_moe(config: TransformerConfig) -> dict[str, Any]:
    moe = moe_of(config)
    size = moe.shared * moe.intermediate
    return _write_moe(config) | {"shared_expert_intermediate_size": size, "qkv_bias": config.attention_bias}


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    base=PRESETS["qwen1.5-moe-a2.7b"],
    prefix="model.",
    fields=NO_HEAD_DIM,
    constants={"attention_dropout": 0.0},
    reads=_read_qwen2_moe,
    writes=_write_qwen2_moe,
    rows=(
        *BODY,
        *GROUPED,
        *GATED,
        *_EXPERTS,
        *both("layers.{n}.feedforward.shared.gate", _MLP + "shared_expert.gate_proj"),
        *both("layers.{n}.feedforward.shared.up", _MLP + "shared_expert.up_proj"),
        *both("layers.{n}.feedforward.shared.down", _MLP + "shared_expert.down_proj"),
        *both("layers.{n}.feedforward.shared_gate", _MLP + "shared_expert_gate"),
    ),
    heads=decoder_heads("Qwen2Moe"),
    or_as_it_is=True,
)


def _read_qwen3_moe(hf_config: Any) -> dict[str, Any]:
    # The class always has this size; its configuration has it only if a file sets it.
    size = {"head_dim": getattr(hf_config, "head_dim", None) or 0}
    return (
        read_rope(hf_config) | size | {"moe": _read_moe(hf_config), "output_bias": hf_config.attention_bias}
    )


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    base=PRESETS["qwen3-30b-a3b"],
    fields=NO_HEAD_DIM | {"attention_bias": "attention_bias"},
    reads=_read_qwen3_moe,
    writes=lambda config: _write_moe(config) | {"head_dim": config.head_dim},
    rows=QWEN3.rows + _EXPERTS,
    heads=decoder_heads("Qwen3Moe"),
    or_as_it_is=True,
)

"""Conversion table of gpt-oss, a decoder with experts, attention sinks and windows in every second layer."""

from __future__ import annotations

from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables import router_weights
from workloads.hf.tables.decoders import BODY, FIELDS, GROUPED, decoder_heads, read_rope, write_rope
from workloads.hf.tables.experts import moe_of
from workloads.hf.tables.family import Family, Row, one
from workloads.hf.tables.windowed import read_windows, write_windows
from workloads.model.config import TransformerConfig
from workloads.model.parts import MoE
from workloads.model.presets import PRESETS

_EXPERTS = "layers.{n}.feedforward.experts."
_THEIRS = "model.layers.{n}.mlp.experts."


def _read(hf_config: Any) -> dict[str, Any]:
    moe = MoE(
        experts=hf_config.num_local_experts,
        top_k=hf_config.num_experts_per_tok,
        intermediate=hf_config.intermediate_size,
        bias=True,
        normalise=True,
        auxiliary=router_weights.of_each(
            hf_config.router_aux_loss_coef, hf_config.num_hidden_layers, hf_config.num_experts_per_tok
        ),
    )
    fields = {"moe": moe, "output_bias": hf_config.attention_bias}
    return read_rope(hf_config) | read_windows(hf_config) | fields


def _write(config: TransformerConfig) -> dict[str, Any]:
    moe = moe_of(config)
    if not (moe.bias and moe.normalise and moe.gate == "softmax") or moe.every > 1 or moe.first:
        raise WorkloadError(
            "gpt-oss needs normalised softmax routing with biases in every layer; set moe.bias, moe.normalise, "
            "moe.gate: softmax, moe.every: 1 and moe.first: 0, or checkpoint.export to null"
        )
    if moe.intermediate != config.intermediate:
        raise WorkloadError("gpt-oss needs experts as wide as intermediate; set moe.intermediate to it")
    # The class builds the window mask even if no layer uses one.
    return write_rope(config) | write_windows(config) | {
        "sliding_window": config.window or PRESETS["gpt-oss-20b"].window,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": router_weights.of_all(moe.auxiliary, config.layers, moe.top_k),
    }  # fmt: skip


GPT_OSS = Family(
    model_type="gpt_oss",
    base=PRESETS["gpt-oss-20b"],
    prefix="model.",
    fields={k: v for k, v in FIELDS.items() if k != "activation"}
    | {
        "attention_bias": "attention_bias",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
    },
    constants={"attention_dropout": 0.0, "hidden_act": "silu"},
    reads=_read,
    writes=_write,
    rows=(
        *BODY,
        *GROUPED,
        *one("layers.{n}.attention.sinks.weight", "model.layers.{n}.self_attn.sinks"),
        *one("layers.{n}.feedforward.router.weight", "model.layers.{n}.mlp.router.weight"),
        *one("layers.{n}.feedforward.router.logit_bias", "model.layers.{n}.mlp.router.bias"),
        Row(
            (_EXPERTS + "gate", _EXPERTS + "up"),
            _THEIRS + "gate_up_proj",
            transposed=True,
            is_interleaved=True,
        ),
        Row(
            (_EXPERTS + "gate_bias", _EXPERTS + "up_bias"), _THEIRS + "gate_up_proj_bias", is_interleaved=True
        ),
        Row((_EXPERTS + "down",), _THEIRS + "down_proj", transposed=True),
        *one(_EXPERTS + "down_bias", _THEIRS + "down_proj_bias"),
    ),
    heads=decoder_heads("GptOss"),
    or_as_it_is=True,
    in_4_bits=True,
)

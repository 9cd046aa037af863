"""Conversion tables of dense decoders with windows or other norms: Qwen 2, Mistral, Phi-3, Gemma 2 and 3, OLMo 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables.decoders import (
    BODY,
    FIELDS,
    GATED,
    GROUPED,
    LLAMA,
    decoder_heads,
    read_rope,
    read_rope_of,
    write_rope,
)
from workloads.hf.tables.family import Family, Head, both
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS

NO_HEAD_DIM = {k: v for k, v in FIELDS.items() if k != "head_dim"}
"""The fields of a class that divides the hidden size by its heads."""


def read_windows(hf_config: Any) -> dict[str, Any]:
    """Return our window and full_every from sliding_window and layer_types. Raises WorkloadError for an irregular
    order.
    """
    window = hf_config.sliding_window or 0
    types = hf_config.layer_types
    full = [kind == "full_attention" for kind in types]
    if all(full) or not window:
        return {"window": 0, "full_every": 0}
    every = full.index(True) + 1 if any(full) else 0
    if full != [bool(every) and (i + 1) % every == 0 for i in range(len(full))]:
        raise WorkloadError(
            f"layer_types of {hf_config.model_type} follow an order that is not supported here: none or "
            "every n-th layer must be full_attention"
        )
    return {"window": window, "full_every": every}


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return sliding_window and layer_types."""
    every = config.full_every
    full = [not config.window or bool(every and (i + 1) % every == 0) for i in range(config.layers)]
    return {
        "sliding_window": config.window or None,
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
    }


def _write_qwen2(config: TransformerConfig) -> dict[str, Any]:
    if config.full_every:
        raise WorkloadError("Qwen 2 has windows in its last layers or none; set full_every to 0")
    first = {
        "use_sliding_window": bool(config.window),
        "max_window_layers": 0 if config.window else config.layers,
    }
    return write_rope(config) | write_windows(config) | first


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    base=PRESETS["qwen2-7b"],
    fields=NO_HEAD_DIM,
    reads=lambda hf_config: read_rope(hf_config) | read_windows(hf_config),
    writes=_write_qwen2,
    heads=decoder_heads("Qwen2"),
    or_as_it_is=True,
)

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    base=PRESETS["mistral-7b"],
    fields=FIELDS,
    reads=lambda hf_config: read_rope(hf_config) | {"window": hf_config.sliding_window or 0},
    writes=lambda config: write_rope(config) | {"sliding_window": config.window or None},
    heads=decoder_heads("Mistral"),
    or_as_it_is=True,
)

_PHI3 = "model.layers.{n}."
PHI3 = replace(
    MISTRAL,
    model_type="phi3",
    base=PRESETS["phi-3-mini"],
    fields=NO_HEAD_DIM,
    constants={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    rows=(
        *BODY,
        *both(("layers.{n}.attention.query", "layers.{n}.attention.key", "layers.{n}.attention.value"),
              _PHI3 + "self_attn.qkv_proj"),
        *both(("layers.{n}.feedforward.gate", "layers.{n}.feedforward.up"), _PHI3 + "mlp.gate_up_proj"),
        *both("layers.{n}.feedforward.down", _PHI3 + "mlp.down_proj"),
    ),
    heads=decoder_heads("Phi3"),
)  # fmt: skip

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    base=PRESETS["olmo-2-7b"],
    fields=NO_HEAD_DIM | {"attention_bias": "attention_bias"},
    rows=(
        *(row for row in BODY if "_norm" not in row.names[0]),
        *GROUPED,
        *GATED,
        *both("layers.{n}.attention.query_norm", "model.layers.{n}.self_attn.q_norm"),
        *both("layers.{n}.attention.key_norm", "model.layers.{n}.self_attn.k_norm"),
        *both("layers.{n}.attention_out_norm", "model.layers.{n}.post_attention_layernorm"),
        *both("layers.{n}.feedforward_out_norm", "model.layers.{n}.post_feedforward_layernorm"),
    ),
    # transformers has no class for token classes
    heads={name: head for name, head in decoder_heads("Olmo2").items() if name != "token"},
    or_as_it_is=True,
)


def _read_gemma2(hf_config: Any) -> dict[str, Any]:
    if hf_config.use_bidirectional_attention:
        raise WorkloadError("this Gemma 2 sees later tokens, which is not supported here; remove the setting")
    return read_rope(hf_config) | read_windows(hf_config) | {
        "attention_scale": hf_config.query_pre_attn_scalar**-0.5,
        "score_cap": hf_config.attn_logit_softcapping or 0.0,
        "logit_cap": hf_config.final_logit_softcapping or 0.0,
        "output_bias": hf_config.attention_bias,
    }  # fmt: skip


def _write_gemma2(config: TransformerConfig) -> dict[str, Any]:
    return write_rope(config) | write_windows(config) | {
        "query_pre_attn_scalar": round(config.attention_scale**-2) if config.attention_scale else config.head_dim,
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
    }  # fmt: skip


GEMMA2 = Family(
    model_type="gemma2",
    base=PRESETS["gemma-2-2b"],
    prefix="model.",
    fields={**FIELDS, "activation": "hidden_activation", "attention_bias": "attention_bias"},
    constants={"attention_dropout": 0.0},
    reads=_read_gemma2,
    writes=_write_gemma2,
    rows=(
        *(row for row in BODY if "feedforward_norm" not in row.names[0]),
        *GROUPED,
        *GATED,
        *both("layers.{n}.attention_out_norm", "model.layers.{n}.post_attention_layernorm"),
        *both("layers.{n}.feedforward_norm", "model.layers.{n}.pre_feedforward_layernorm"),
        *both("layers.{n}.feedforward_out_norm", "model.layers.{n}.post_feedforward_layernorm"),
    ),
    heads=decoder_heads("Gemma2"),
    or_as_it_is=True,
)


def _read_gemma3(hf_config: Any) -> dict[str, Any]:
    if hf_config.use_bidirectional_attention:
        raise WorkloadError("this Gemma 3 sees later tokens, which is not supported here; remove the setting")
    windows = read_windows(hf_config)
    rope = hf_config.rope_parameters
    if not windows["full_every"]:
        raise WorkloadError(
            "layer_types of gemma3_text has no order of both kinds, which is not supported here"
        )
    near = dict(rope["sliding_attention"])
    if near.get("rope_type", "default") != "default":
        raise WorkloadError(
            "rotary positions of windows are scaled, which is not supported here; remove that"
        )
    return {
        **windows,
        **read_rope_of(hf_config, rope["full_attention"]),
        "window_theta": near["rope_theta"],
        "attention_scale": hf_config.query_pre_attn_scalar**-0.5,
        "logit_cap": hf_config.final_logit_softcapping or 0.0,
        "output_bias": hf_config.attention_bias,
    }


def _write_gemma3(config: TransformerConfig) -> dict[str, Any]:
    near = {"rope_theta": config.window_theta or config.rope_theta, "rope_type": "default"}
    return write_windows(config) | {
        "rope_parameters": {
            "full_attention": write_rope(config)["rope_parameters"],
            "sliding_attention": near,
        },
        "query_pre_attn_scalar": round(config.attention_scale**-2)
        if config.attention_scale
        else config.head_dim,
        "final_logit_softcapping": config.logit_cap or None,
    }


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    base=PRESETS["gemma-3-1b"],
    reads=_read_gemma3,
    writes=_write_gemma3,
    rows=(
        *GEMMA2.rows,
        *both("layers.{n}.attention.query_norm", "model.layers.{n}.self_attn.q_norm"),
        *both("layers.{n}.attention.key_norm", "model.layers.{n}.self_attn.k_norm"),
    ),
    heads={
        "language": decoder_heads("Gemma3")["language"],
        "sequence": decoder_heads("Gemma3Text")["sequence"],
        "none": Head("Gemma3TextModel"),
    },
)

"""Conversion tables of the dense decoders: GPT-2, Llama, Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables.family import Family, Head, both, one
from workloads.model.config import TransformerConfig
from workloads.model.parts import RopeScaling
from workloads.model.presets import PRESETS


def decoder_heads(prefix: str) -> dict[str, Head]:
    """Return the heads of a decoder family whose classes begin with `prefix`, by the names of our heads."""
    return {
        "language": Head(f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM",
                         one("head.weight", "lm_head.weight")),
        "sequence": Head(f"{prefix}ForSequenceClassification", one("head.output.weight", "score.weight")),
        "token": Head(f"{prefix}ForTokenClassification",
                      both("head.output", "classifier" if prefix == "GPT2" else "score")),
        "none": Head(f"{prefix}Model"),
    }  # fmt: skip


def _read_gpt2(hf_config: Any) -> dict[str, Any]:
    if (
        hf_config.scale_attn_by_inverse_layer_idx
        or not hf_config.scale_attn_weights
        or hf_config.add_cross_attention
    ):
        raise WorkloadError(
            "this GPT-2 scales its attention unusually; load it as another class of transformers"
        )
    return {"intermediate": hf_config.n_inner or 4 * hf_config.n_embd}


GPT2 = Family(
    model_type="gpt2",
    base=PRESETS["gpt2"],
    prefix="transformer.",
    fields={
        "vocab_size": "vocab_size", "hidden": "n_embd", "layers": "n_layer", "heads": "n_head",
        "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "activation": "activation_function",
        "tied": "tie_word_embeddings",
    },
    constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    reads=_read_gpt2,
    writes=lambda config: {"n_inner": config.intermediate},
    rows=(
        *one("tokens.weight", "transformer.wte.weight"),
        *one("embeddings.positions.weight", "transformer.wpe.weight"),
        *both("layers.{n}.attention_norm", "transformer.h.{n}.ln_1"),
        *both(("layers.{n}.attention.query", "layers.{n}.attention.key", "layers.{n}.attention.value"),
              "transformer.h.{n}.attn.c_attn", transposed=True),
        *both("layers.{n}.attention.output", "transformer.h.{n}.attn.c_proj", transposed=True),
        *both("layers.{n}.feedforward_norm", "transformer.h.{n}.ln_2"),
        *both("layers.{n}.feedforward.up", "transformer.h.{n}.mlp.c_fc", transposed=True),
        *both("layers.{n}.feedforward.down", "transformer.h.{n}.mlp.c_proj", transposed=True),
        *both("norm", "transformer.ln_f"),
    ),
    heads=decoder_heads("GPT2"),
)  # fmt: skip


def read_rope(hf_config: Any) -> dict[str, Any]:
    """Return our rope_theta and rope_scaling from transformers' rope_parameters."""
    return read_rope_of(hf_config, hf_config.rope_parameters)


def read_rope_of(hf_config: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same from these parameters, which may apply to some layers only."""
    rope = rope_as_read(hf_config, parameters)
    kind = rope.get("rope_type", "default")
    theta = rope["rope_theta"]
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("linear", "llama3", "yarn"):
        raise WorkloadError(f"rope type {kind!r} is not supported here; use default, linear, llama3 or yarn")
    scaling = RopeScaling(
        kind,
        rope.get("factor") or _stretch(hf_config, rope),
        original_positions=0
        if kind == "linear"
        else rope.get("original_max_position_embeddings") or hf_config.max_position_embeddings,
        low_frequency=rope.get("low_freq_factor", 1.0),
        high_frequency=rope.get("high_freq_factor", 4.0),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope.get("mscale") or 0.0,
        mscale_all=rope.get("mscale_all_dim") or 0.0,
        attention_factor=rope.get("attention_factor") or 0.0,
        truncate=rope.get("truncate", True),
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_as_read(hf_config: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as transformers' classes use them: original_max_position_embeddings beside them takes
    precedence.
    """
    rope = dict(parameters)
    beside = getattr(hf_config, "original_max_position_embeddings", None)
    if beside is not None and rope.get("rope_type") in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = beside
    return rope


def _stretch(hf_config: Any, rope: dict[str, Any]) -> float:
    """Return the scaling factor for a configuration without one."""
    if not rope.get("original_max_position_embeddings"):
        raise WorkloadError("rope_parameters has no factor; give it in config.json")
    return float(hf_config.max_position_embeddings / rope["original_max_position_embeddings"])


def write_rope(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json about rotary positions."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_type": scaling.kind if scaling else "default",
    }
    if scaling:
        rope["factor"] = scaling.factor
    if scaling and scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
    if scaling and scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.mscale:
            rope["mscale"] = scaling.mscale
        if scaling.mscale_all:
            rope["mscale_all_dim"] = scaling.mscale_all
        if scaling.attention_factor:
            rope["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            rope["truncate"] = False
    if scaling and scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_positions
    return {"rope_parameters": rope}


BODY = (
    *one("tokens.weight", "model.embed_tokens.weight"),
    *both("layers.{n}.attention_norm", "model.layers.{n}.input_layernorm"),
    *both("layers.{n}.attention.output", "model.layers.{n}.self_attn.o_proj"),
    *both("layers.{n}.feedforward_norm", "model.layers.{n}.post_attention_layernorm"),
    *both("norm", "model.norm"),
)
GROUPED = (
    *both("layers.{n}.attention.query", "model.layers.{n}.self_attn.q_proj"),
    *both("layers.{n}.attention.key", "model.layers.{n}.self_attn.k_proj"),
    *both("layers.{n}.attention.value", "model.layers.{n}.self_attn.v_proj"),
)
GATED = (
    *both("layers.{n}.feedforward.gate", "model.layers.{n}.mlp.gate_proj"),
    *both("layers.{n}.feedforward.up", "model.layers.{n}.mlp.up_proj"),
    *both("layers.{n}.feedforward.down", "model.layers.{n}.mlp.down_proj"),
)
FIELDS = {
    "vocab_size": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "intermediate": "intermediate_size", "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "activation": "hidden_act", "tied": "tie_word_embeddings",
}  # fmt: skip


def _read_llama(hf_config: Any) -> dict[str, Any]:
    return read_rope(hf_config) | {"output_bias": hf_config.attention_bias}


LLAMA = Family(
    model_type="llama",
    base=PRESETS["llama-3-8b"],
    prefix="model.",
    fields=FIELDS | {"attention_bias": "attention_bias", "feedforward_bias": "mlp_bias"},
    constants={"attention_dropout": 0.0},
    reads=_read_llama,
    writes=write_rope,
    rows=BODY + GROUPED + GATED,
    heads=decoder_heads("Llama"),
)


def _read_qwen3(hf_config: Any) -> dict[str, Any]:
    if hf_config.use_sliding_window:
        raise WorkloadError(
            "this Qwen 3 mixes windows over layers, which is not supported here; turn them off"
        )
    return _read_llama(hf_config)


QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    base=PRESETS["qwen3-8b"],
    fields=FIELDS | {"attention_bias": "attention_bias"},
    reads=_read_qwen3,
    rows=LLAMA.rows
    + both("layers.{n}.attention.query_norm", "model.layers.{n}.self_attn.q_norm")
    + both("layers.{n}.attention.key_norm", "model.layers.{n}.self_attn.k_norm"),
    heads=decoder_heads("Qwen3"),
)

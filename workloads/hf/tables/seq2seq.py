"""Conversion tables of the encoder-decoders: T5, mT5, BART, mBART, PEGASUS, Switch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workloads.errors import WorkloadError
from workloads.hf.tables import router_weights
from workloads.hf.tables.family import ACTIVATIONS, Family, Head, Row, both, one
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS

if TYPE_CHECKING:
    from torch import Tensor


def _t5_attention(module: str, hf_module: str) -> tuple[Row, ...]:
    return (
        *one(module + "query.weight", hf_module + "q.weight"),
        *one(module + "key.weight", hf_module + "k.weight"),
        *one(module + "value.weight", hf_module + "v.weight"),
        *one(module + "output.weight", hf_module + "o.weight"),
    )


def _t5_side(side: str, feed: int) -> tuple[Row, ...]:
    """Return the rows of one stack. `feed` is the index of the feed-forward network among the sub-layers of a block."""
    prefix = f"{side}.layers.{{n}}."
    block = f"{side}.block.{{n}}.layer."
    return (
        Row((f"{side}.relative_bias.weight",),
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", transposed=True),
        *_t5_attention(prefix + "attention.", block + "0.SelfAttention."),
        *one(prefix + "attention_norm.weight", block + "0.layer_norm.weight"),
        *_t5_attention(prefix + "cross_attention.", block + "1.EncDecAttention."),
        *one(prefix + "cross_norm.weight", block + "1.layer_norm.weight"),
        *one(prefix + "feedforward_norm.weight", f"{block}{feed}.layer_norm.weight"),
        *one(f"{side}.norm.weight", f"{side}.final_layer_norm.weight"),
    )  # fmt: skip


def _t5_feed(side: str, feed: int, gated: bool) -> tuple[Row, ...]:
    prefix = f"{side}.layers.{{n}}.feedforward."
    hf_prefix = f"{side}.block.{{n}}.layer.{feed}.DenseReluDense."
    up = (
        (
            *one(prefix + "gate.weight", hf_prefix + "wi_0.weight"),
            *one(prefix + "up.weight", hf_prefix + "wi_1.weight"),
        )
        if gated
        else one(prefix + "up.weight", hf_prefix + "wi.weight")
    )
    return (*up, *one(prefix + "down.weight", hf_prefix + "wo.weight"))


_T5_FIELDS = {
    "vocab_size": "vocab_size", "hidden": "d_model", "layers": "num_layers", "heads": "num_heads",
    "decoder_layers": "num_decoder_layers", "head_dim": "d_kv", "intermediate": "d_ff",
    "norm_eps": "layer_norm_epsilon", "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
}  # fmt: skip
_T5_BODY = (
    *one("tokens.weight", "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    *_t5_side("encoder", 1),
    *_t5_side("decoder", 2),
)
_LM_HEAD = one("head.weight", "lm_head.weight")


def _read_t5(hf_config: Any) -> dict[str, Any]:
    # transformers records only whether the output is scaled, and ties the embeddings unless the weights have two
    # tables.
    # A configuration without weights is T5 1.1 if its output is not scaled: T5 1.1 has two tables.
    scaled = hf_config.scale_decoder_outputs
    return _read_positions(hf_config) | {
        "activation": hf_config.dense_act_fn,
        "gated": hf_config.is_gated_act,
        "scaled_head": scaled,
        "tied": scaled,
    }


def _read_positions(hf_config: Any) -> dict[str, Any]:
    # These classes have no limit on positions. Published configurations store it under this name.
    return {"max_positions": getattr(hf_config, "n_positions", 512)}


def _write_t5(config: TransformerConfig) -> dict[str, Any]:
    activation = ACTIVATIONS[config.activation]
    if config.gated:
        # transformers reads gated-gelu as the tanh approximation (T5 1.1), so the exact one needs its other name.
        activation = "gated-" + {"gelu_new": "gelu", "gelu": "gelu_python"}.get(activation, activation)
    return {
        "feed_forward_proj": activation,
        "scale_decoder_outputs": config.scaled_head,
        "n_positions": config.max_positions,
    }


T5 = Family(
    model_type="t5",
    base=PRESETS["t5-base"],
    fields=_T5_FIELDS,
    constants={"dropout_rate": 0.0},
    unsaid=("tied",),
    reads=_read_t5,
    writes=_write_t5,
    rows=_T5_BODY + _t5_feed("encoder", 1, False) + _t5_feed("decoder", 2, False),
    heads={"language": Head("T5ForConditionalGeneration", _LM_HEAD), "none": Head("T5Model")},
)
T5_GATED = replace(
    T5,
    rows=_T5_BODY + _t5_feed("encoder", 1, True) + _t5_feed("decoder", 2, True),
    base=PRESETS["t5-v1.1-base"],
)


def _read_mt5(hf_config: Any) -> dict[str, Any]:
    gated = {"activation": hf_config.dense_act_fn, "gated": hf_config.is_gated_act}
    return _read_positions(hf_config) | gated


def _write_mt5(config: TransformerConfig) -> dict[str, Any]:
    if not config.gated or config.scaled_head:
        raise WorkloadError(
            "mT5 has a gated feed-forward and no scaled head; set gated: true, scaled_head: false"
        )
    return {k: v for k, v in _write_t5(config).items() if k != "scale_decoder_outputs"}


MT5 = replace(
    T5_GATED,
    model_type="mt5",
    base=PRESETS["mt5-small"],
    reads=_read_mt5,
    writes=_write_mt5,
    heads={"language": Head("MT5ForConditionalGeneration", _LM_HEAD), "none": Head("MT5Model")},
    or_as_it_is=True,
)


UNLIMITED = 2**31 - 1
"""Expert capacity in transformers for a router that drops nothing."""


def _switch_feed(side: str, feed: int) -> tuple[Row, ...]:
    prefix = f"{side}.layers.{{n}}.feedforward."
    hf_prefix = f"{side}.block.{{n}}.layer.{feed}.mlp."
    return (
        *one(prefix + "up.weight", hf_prefix + "wi.weight"),
        *one(prefix + "down.weight", hf_prefix + "wo.weight"),
        *one(prefix + "router.weight", hf_prefix + "router.classifier.weight"),
        *one(prefix + "experts.up", hf_prefix + "experts.expert_{e}.wi.weight"),
        *one(prefix + "experts.down", hf_prefix + "experts.expert_{e}.wo.weight"),
    )


def _read_switch(hf_config: Any) -> dict[str, Any]:
    base = PRESETS["switch-base-8"].moe
    assert base is not None
    step = hf_config.encoder_sparse_step
    if step != hf_config.decoder_sparse_step:
        raise WorkloadError(
            f"encoder_sparse_step is {step} and decoder_sparse_step is {hf_config.decoder_sparse_step}; "
            "only Switch models with equal steps are supported"
        )
    if hf_config.router_bias:
        raise WorkloadError("router_bias is true; only Switch models without a router bias are supported")
    capacity = hf_config.expert_capacity
    moe = replace(
        base,
        experts=hf_config.num_experts,
        intermediate=hf_config.d_ff,
        every=step,
        first=1 if step > 1 else 0,
        capacity_factor=None,
        capacity=capacity if capacity < UNLIMITED else None,
    )
    routed = moe.routed(hf_config.num_layers) + moe.routed(hf_config.num_decoder_layers)
    moe = replace(
        moe,
        auxiliary=router_weights.of_each(hf_config.router_aux_loss_coef, routed, stacks=2),
        z_loss=router_weights.of_each(hf_config.router_z_loss_coef, routed, stacks=2),
    )
    tied = hf_config.tie_word_embeddings
    fields = {"moe": moe, "activation": hf_config.dense_act_fn, "tied": tied, "scaled_head": tied}
    return _read_positions(hf_config) | fields


def _write_switch(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    if (
        moe is None
        or moe.top_k != 1
        or moe.first != (moe.every > 1)
        or moe.intermediate != config.intermediate
    ):
        raise WorkloadError(
            "Switch needs one expert per token, as wide as the other layers; set moe.top_k: 1, moe.intermediate to "
            "intermediate, and moe.first: 1 if moe.every is above 1, else 0; or set checkpoint.export to null"
        )
    if moe.capacity_factor is not None:
        raise WorkloadError(
            "Switch of transformers has one capacity for every length; give moe.capacity in tokens and set "
            "moe.capacity_factor to null"
        )
    routed = moe.routed(config.layers) + moe.routed(config.decoder_layers)
    return {
        "num_experts": moe.experts,
        "n_positions": config.max_positions,
        "expert_capacity": UNLIMITED if moe.capacity is None else moe.capacity,
        "num_sparse_encoder_layers": config.layers // moe.every,
        "num_sparse_decoder_layers": config.decoder_layers // moe.every,
        "router_aux_loss_coef": router_weights.of_all(moe.auxiliary, routed, stacks=2),
        "router_z_loss_coef": router_weights.of_all(moe.z_loss, routed, stacks=2),
        "dense_act_fn": ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tied,
    }


SWITCH = Family(
    model_type="switch_transformers",
    base=PRESETS["switch-base-8"],
    fields=_T5_FIELDS,
    constants={"dropout_rate": 0.0, "router_jitter_noise": 0.0},
    reads=_read_switch,
    writes=_write_switch,
    rows=_T5_BODY + _switch_feed("encoder", 1) + _switch_feed("decoder", 2),
    heads={
        "language": Head("SwitchTransformersForConditionalGeneration", _LM_HEAD),
        "none": Head("SwitchTransformersModel"),
    },
)


def _bart_attention(module: str, hf_module: str) -> tuple[Row, ...]:
    return (
        *both(module + ".query", hf_module + ".q_proj"),
        *both(module + ".key", hf_module + ".k_proj"),
        *both(module + ".value", hf_module + ".v_proj"),
        *both(module + ".output", hf_module + ".out_proj"),
    )


def _bart_side(side: str) -> tuple[Row, ...]:
    prefix = f"{side}.layers.{{n}}."
    hf_prefix = f"model.{side}.layers.{{n}}."
    return (
        *one(f"{side}.embeddings.positions.weight", f"model.{side}.embed_positions.weight"),
        *both(f"{side}.embeddings.norm", f"model.{side}.layernorm_embedding"),
        *_bart_attention(prefix + "attention", hf_prefix + "self_attn"),
        *both(prefix + "attention_norm", hf_prefix + "self_attn_layer_norm"),
        *_bart_attention(prefix + "cross_attention", hf_prefix + "encoder_attn"),
        *both(prefix + "cross_norm", hf_prefix + "encoder_attn_layer_norm"),
        *both(prefix + "feedforward.up", hf_prefix + "fc1"),
        *both(prefix + "feedforward.down", hf_prefix + "fc2"),
        *both(prefix + "feedforward_norm", hf_prefix + "final_layer_norm"),
    )


def _read_bart(hf_config: Any) -> dict[str, Any]:
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = (getattr(hf_config, f"{side}_{name}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise WorkloadError(
                f"encoder_{name} is {encoder} and decoder_{name} is {decoder}; "
                f"only {hf_config.model_type} models with equal ones are supported"
            )
    return {}


def _write_bart(config: TransformerConfig) -> dict[str, Any]:
    return {"decoder_ffn_dim": config.intermediate, "decoder_attention_heads": config.heads}


BART = Family(
    model_type="bart",
    base=PRESETS["bart-base"],
    prefix="model.",
    fields={
        "vocab_size": "vocab_size", "hidden": "d_model", "layers": "encoder_layers",
        "decoder_layers": "decoder_layers", "heads": "encoder_attention_heads",
        "intermediate": "encoder_ffn_dim", "max_positions": "max_position_embeddings",
        "activation": "activation_function", "scaled_embedding": "scale_embedding",
        "tied": "tie_word_embeddings",
    },
    constants={"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    reads=_read_bart,
    writes=_write_bart,
    rows=(
        *one("tokens.weight", "model.shared.weight", "model.encoder.embed_tokens.weight",
             "model.decoder.embed_tokens.weight"),
        *_bart_side("encoder"),
        *_bart_side("decoder"),
    ),
    heads={"language": Head("BartForConditionalGeneration", _LM_HEAD), "none": Head("BartModel")},
)  # fmt: skip

MBART = replace(
    BART,
    model_type="mbart",
    base=PRESETS["mbart-large"],
    rows=(
        *BART.rows,
        *both("encoder.norm", "model.encoder.layer_norm"),
        *both("decoder.norm", "model.decoder.layer_norm"),
    ),
    heads={"language": Head("MBartForConditionalGeneration", _LM_HEAD), "none": Head("MBartModel")},
    or_as_it_is=True,
)


def _sinusoids(config: TransformerConfig) -> dict[str, Tensor]:
    import torch

    from workloads.model.positions import sinusoids

    table = sinusoids(torch.arange(config.max_positions), config.hidden)
    return {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


PEGASUS = replace(
    MBART,
    model_type="pegasus",
    base=PRESETS["pegasus-large"],
    rows=tuple(row for row in MBART.rows if "embeddings" not in row.names[0]),
    heads={"language": Head("PegasusForConditionalGeneration", _LM_HEAD), "none": Head("PegasusModel")},
    computed=_sinusoids,
)

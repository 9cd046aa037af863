"""Conversion table of DeBERTa V2 and V3, which have disentangled attention."""

from __future__ import annotations

from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables.encoders import BERT, encoder_layers, masked_head, sentence_rows
from workloads.hf.tables.family import Family, Head, both, one
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS

ATTENDS = {"c2p", "p2c"}
"""Content-to-position and position-to-content attention."""


def _read(hf_config: Any) -> dict[str, Any]:
    """Return our fields. The class reads most of its options from keys that its configuration
    class does not declare.
    """

    def option(name: str, missing: Any) -> Any:
        return getattr(hf_config, name, missing)

    hidden = hf_config.hidden_size
    heads = hf_config.num_attention_heads
    for name, value, wanted in (
        ("relative_attention", bool(hf_config.relative_attention), True),
        ("pos_att_type", sorted(hf_config.pos_att_type or []), sorted(ATTENDS)),
        ("share_att_key", option("share_att_key", False), True),
        ("norm_rel_ebd", option("norm_rel_ebd", "none"), "layer_norm"),
        ("conv_kernel_size", option("conv_kernel_size", 0), 0),
        ("embedding_size", option("embedding_size", hidden), hidden),
        ("attention_head_size", option("attention_head_size", hidden // heads), hidden // heads),
        ("pooler_hidden_size", option("pooler_hidden_size", hidden), hidden),
    ):
        if value != wanted:
            raise WorkloadError(
                f"{name} {value!r} of deberta-v2 is not supported here, only {wanted!r}; use another checkpoint"
            )
    if option("position_buckets", -1) < 1:
        raise WorkloadError(
            "this deberta-v2 has no position_buckets, which is not supported here; use another"
        )
    farthest = option("max_relative_positions", -1)
    return {
        "disentangled": hf_config.position_buckets,
        "relative_distance": farthest if farthest > 0 else hf_config.max_position_embeddings,
        "positions": "learned" if hf_config.position_biased_input else "none",
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    if not config.disentangled:
        raise WorkloadError("DeBERTa V2 has disentangled attention; set disentangled")
    return {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_buckets": config.disentangled,
        "max_relative_positions": config.relative_distance,
        "position_biased_input": config.positions == "learned",
        "pooler_hidden_size": config.hidden,
    }


_POOLER = "pooler.dense"
DEBERTA_V2 = Family(
    model_type="deberta-v2",
    base=PRESETS["deberta-v3-base"],
    prefix="deberta.",
    fields={**BERT.fields, "pooler": "pooler_hidden_act"},
    constants={
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pooler_dropout": 0.0, "legacy": True,
    },
    reads=_read,
    writes=_write,
    rows=(
        *one("tokens.weight", "deberta.embeddings.word_embeddings.weight"),
        *one("embeddings.positions.weight", "deberta.embeddings.position_embeddings.weight"),
        *one("embeddings.token_types.weight", "deberta.embeddings.token_type_embeddings.weight"),
        *both("embeddings.norm", "deberta.embeddings.LayerNorm"),
        *one("distances.weight", "deberta.encoder.rel_embeddings.weight"),
        *both("distances.norm", "deberta.encoder.LayerNorm"),
        *encoder_layers("deberta", "query_proj", "key_proj", "value_proj"),
    ),
    heads={
        "masked": Head(
            "DebertaV2ForMaskedLM",
            masked_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
                        "cls.predictions.decoder", "cls.predictions.bias"),
        ),
        "sequence": Head(
            "DebertaV2ForSequenceClassification", sentence_rows("head", _POOLER, "classifier")
        ),
        "token": Head("DebertaV2ForTokenClassification", both("head.output", "classifier")),
        "span": Head("DebertaV2ForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head("DebertaV2Model"),
    },
    or_as_it_is=True,
    unused=r"(lm|mask)_predictions\..+",
)  # fmt: skip

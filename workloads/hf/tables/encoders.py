"""Conversion tables of the encoders: BERT (and UniLM), ERNIE, RoBERTa, XLM-R, MPNet, DistilBERT, ALBERT, ELECTRA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables.family import Family, Head, Row, both, one
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS

_FIELDS = {
    "vocab_size": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "layer_norm_eps", "activation": "hidden_act",
    "token_types": "type_vocab_size", "tied": "tie_word_embeddings",
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


def _embeddings(prefix: str) -> tuple[Row, ...]:
    return (
        *one("tokens.weight", f"{prefix}.embeddings.word_embeddings.weight"),
        *one("embeddings.positions.weight", f"{prefix}.embeddings.position_embeddings.weight"),
        *one("embeddings.token_types.weight", f"{prefix}.embeddings.token_type_embeddings.weight"),
        *both("embeddings.norm", f"{prefix}.embeddings.LayerNorm"),
    )


def _typed(config: TransformerConfig) -> dict[str, Any]:
    if not config.token_types:
        raise WorkloadError(f"{config.family} of transformers has token types; set token_types to 1 or more")
    return {}


def encoder_layers(
    prefix: str, query: str = "query", key: str = "key", value: str = "value", ours: str = ""
) -> tuple[Row, ...]:
    """Return the rows of the encoder layers in the module `prefix`, with these names of the projections.

    `ours` is a prefix of our names.
    """
    mine = f"{ours}layers.{{n}}."
    layer = f"{prefix}.encoder.layer.{{n}}."
    return (
        *both(mine + "attention.query", layer + f"attention.self.{query}"),
        *both(mine + "attention.key", layer + f"attention.self.{key}"),
        *both(mine + "attention.value", layer + f"attention.self.{value}"),
        *both(mine + "attention.output", layer + "attention.output.dense"),
        *both(mine + "attention_norm", layer + "attention.output.LayerNorm"),
        *both(mine + "feedforward.up", layer + "intermediate.dense"),
        *both(mine + "feedforward.down", layer + "output.dense"),
        *both(mine + "feedforward_norm", layer + "output.LayerNorm"),
    )


def masked_head(dense: str, norm: str, decoder: str, bias: str) -> tuple[Row, ...]:
    """Return the rows of a head for masked language modelling. Its bias may be stored under a second name."""
    second_bias = f"{decoder}.bias"
    return (
        *both("head.dense", dense),
        *both("head.norm", norm),
        *one("head.output.weight", f"{decoder}.weight"),
        *one("head.output.bias", bias, *([second_bias] if second_bias != bias else [])),
    )


def sentence_rows(ours: str, pooler: str, classifier: str) -> tuple[Row, ...]:
    """Return the rows of a head that reads the first token through a pooler."""
    return both(f"{ours}.dense", pooler) + both(f"{ours}.output", classifier)


_BERT_MASKED = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    "cls.predictions.bias",
)  # fmt: skip


def _bert_heads(kind: str, body: str) -> dict[str, Head]:
    """Return the heads of classes whose names begin with `kind` and whose body is the module `body`."""
    pooler = f"{body}.pooler.dense"
    both_losses = _BERT_MASKED + sentence_rows("sentence_head", pooler, "cls.seq_relationship")
    return {
        "masked+sentence": Head(f"{kind}ForPreTraining", both_losses),
        "masked": Head(f"{kind}ForMaskedLM", _BERT_MASKED),
        "sequence": Head(f"{kind}ForSequenceClassification", sentence_rows("head", pooler, "classifier")),
        "token": Head(f"{kind}ForTokenClassification", both("head.output", "classifier")),
        "span": Head(f"{kind}ForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head(f"{kind}Model"),
    }


BERT = Family(
    model_type="bert",
    base=PRESETS["bert-base"],
    prefix="bert.",
    fields=_FIELDS,
    constants=_NO_DROPOUT,
    writes=_typed,
    rows=_embeddings("bert") + encoder_layers("bert"),
    heads=_bert_heads("Bert", "bert"),
)


def _read_ernie(hf_config: Any) -> dict[str, Any]:
    return {"task_types": hf_config.task_type_vocab_size if hf_config.use_task_id else 0}


def _write_ernie(config: TransformerConfig) -> dict[str, Any]:
    kinds = {"task_type_vocab_size": config.task_types} if config.task_types else {}
    return _typed(config) | {"use_task_id": bool(config.task_types)} | kinds


ERNIE = replace(
    BERT,
    model_type="ernie",
    base=PRESETS["ernie-1.0-base"],
    prefix="ernie.",
    reads=_read_ernie,
    writes=_write_ernie,
    rows=(
        *_embeddings("ernie"),
        *one("embeddings.task_types.weight", "ernie.embeddings.task_type_embeddings.weight"),
        *encoder_layers("ernie"),
    ),
    heads=_bert_heads("Ernie", "ernie"),
    or_as_it_is=True,
)
_DISTILBERT = "distilbert.transformer.layer.{n}."
DISTILBERT = Family(
    model_type="distilbert",
    base=PRESETS["distilbert-base"],
    prefix="distilbert.",
    fields={
        "vocab_size": "vocab_size", "hidden": "dim", "layers": "n_layers", "heads": "n_heads",
        "intermediate": "hidden_dim", "max_positions": "max_position_embeddings", "activation": "activation",
        "tied": "tie_word_embeddings",
    },
    constants={"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0, "seq_classif_dropout": 0.0},
    rows=(
        *_embeddings("distilbert"),
        *both("layers.{n}.attention.query", _DISTILBERT + "attention.q_lin"),
        *both("layers.{n}.attention.key", _DISTILBERT + "attention.k_lin"),
        *both("layers.{n}.attention.value", _DISTILBERT + "attention.v_lin"),
        *both("layers.{n}.attention.output", _DISTILBERT + "attention.out_lin"),
        *both("layers.{n}.attention_norm", _DISTILBERT + "sa_layer_norm"),
        *both("layers.{n}.feedforward.up", _DISTILBERT + "ffn.lin1"),
        *both("layers.{n}.feedforward.down", _DISTILBERT + "ffn.lin2"),
        *both("layers.{n}.feedforward_norm", _DISTILBERT + "output_layer_norm"),
    ),
    heads={
        "masked": Head(
            "DistilBertForMaskedLM",
            masked_head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
        ),
        "sequence": Head(
            "DistilBertForSequenceClassification", sentence_rows("head", "pre_classifier", "classifier")
        ),
        "token": Head("DistilBertForTokenClassification", both("head.output", "classifier")),
        "span": Head("DistilBertForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head("DistilBertModel"),
    },
    or_as_it_is=True,
)  # fmt: skip


def _read_roberta(hf_config: Any) -> dict[str, Any]:
    if hf_config.pad_token_id is None:
        raise WorkloadError("RoBERTa counts positions from its padding id; set pad_token_id in config.json")
    offset = hf_config.pad_token_id + 1
    return {"position_offset": offset, "max_positions": hf_config.max_position_embeddings - offset}


def _write_roberta(config: TransformerConfig) -> dict[str, Any]:
    if not config.position_offset:
        raise WorkloadError("RoBERTa counts positions from its padding id; give a tokenizer with <pad>")
    return _typed(config) | {
        "max_position_embeddings": config.max_positions + config.position_offset,
        "pad_token_id": config.position_offset - 1,
    }


ROBERTA = Family(
    model_type="roberta",
    base=PRESETS["roberta-base"],
    prefix="roberta.",
    fields=_FIELDS,
    constants=_NO_DROPOUT,
    reads=_read_roberta,
    writes=_write_roberta,
    rows=_embeddings("roberta") + encoder_layers("roberta"),
    heads={
        "masked": Head(
            "RobertaForMaskedLM",
            masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
        ),
        "sequence": Head(
            "RobertaForSequenceClassification",
            sentence_rows("head", "classifier.dense", "classifier.out_proj"),
        ),
        "token": Head("RobertaForTokenClassification", both("head.output", "classifier")),
        "span": Head("RobertaForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head("RobertaModel"),
    },
)
XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    base=PRESETS["xlm-roberta-base"],
    heads={key: replace(head, kind=f"XLM{head.kind}") for key, head in ROBERTA.heads.items()},
    or_as_it_is=True,
)


def _write_mpnet(config: TransformerConfig) -> dict[str, Any]:
    if config.position_offset != 2:
        raise WorkloadError(
            "MPNet of transformers counts positions from padding id 1; give a tokenizer with it"
        )
    if not (config.relative_bias and config.relative_buckets == 32 and config.relative_distance == 128):
        raise WorkloadError("MPNet of transformers has 32 relative_buckets up to distance 128; set these")
    return {"max_position_embeddings": config.max_positions + 2, "relative_attention_num_buckets": 32}


_MPNET_LAYER = "mpnet.encoder.layer.{n}."
MPNET = Family(
    model_type="mpnet",
    base=PRESETS["mpnet-base"],
    prefix="mpnet.",
    fields={k: v for k, v in _FIELDS.items() if k != "token_types"},
    constants=_NO_DROPOUT,
    reads=lambda hf_config: {"max_positions": hf_config.max_position_embeddings - 2},
    writes=_write_mpnet,
    rows=(
        *_embeddings("mpnet"),
        Row(("relative_bias.weight",), "mpnet.encoder.relative_attention_bias.weight", transposed=True),
        *both("layers.{n}.attention.query", _MPNET_LAYER + "attention.attn.q"),
        *both("layers.{n}.attention.key", _MPNET_LAYER + "attention.attn.k"),
        *both("layers.{n}.attention.value", _MPNET_LAYER + "attention.attn.v"),
        *both("layers.{n}.attention.output", _MPNET_LAYER + "attention.attn.o"),
        *both("layers.{n}.attention_norm", _MPNET_LAYER + "attention.LayerNorm"),
        *both("layers.{n}.feedforward.up", _MPNET_LAYER + "intermediate.dense"),
        *both("layers.{n}.feedforward.down", _MPNET_LAYER + "output.dense"),
        *both("layers.{n}.feedforward_norm", _MPNET_LAYER + "output.LayerNorm"),
    ),
    heads={
        key: replace(head, kind=head.kind.replace("Roberta", "MPNet")) for key, head in ROBERTA.heads.items()
    },
    or_as_it_is=True,
)

_ALBERT_LAYER = "albert.encoder.albert_layer_groups.{n}.albert_layers.0."
_ALBERT_MASKED = masked_head(
    "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
)


def _check_albert(hf_config: Any) -> dict[str, Any]:
    if hf_config.num_hidden_groups != 1 or hf_config.inner_group_num != 1:
        raise WorkloadError(
            "this ALBERT has several groups of layers, which is not supported here; use one group"
        )
    return _check_projection(hf_config.embedding_size, hf_config.hidden_size)


def _check_projection(embedding: int, hidden: int) -> dict[str, Any]:
    if embedding == hidden:
        raise WorkloadError(
            "ALBERT of transformers projects its embedding; give embedding_size unlike hidden"
        )
    return {}


ALBERT = Family(
    model_type="albert",
    base=PRESETS["albert-base"],
    prefix="albert.",
    fields=_FIELDS | {"embedding_size": "embedding_size"},
    constants={
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
        "num_hidden_groups": 1, "inner_group_num": 1,
    },
    reads=_check_albert,
    writes=lambda config: _typed(config) | _check_projection(config.embedding_size, config.hidden),
    rows=(
        *_embeddings("albert"),
        *both("projection", "albert.encoder.embedding_hidden_mapping_in"),
        *both("layers.{n}.attention.query", _ALBERT_LAYER + "attention.query"),
        *both("layers.{n}.attention.key", _ALBERT_LAYER + "attention.key"),
        *both("layers.{n}.attention.value", _ALBERT_LAYER + "attention.value"),
        *both("layers.{n}.attention.output", _ALBERT_LAYER + "attention.dense"),
        *both("layers.{n}.attention_norm", _ALBERT_LAYER + "attention.LayerNorm"),
        *both("layers.{n}.feedforward.up", _ALBERT_LAYER + "ffn"),
        *both("layers.{n}.feedforward.down", _ALBERT_LAYER + "ffn_output"),
        *both("layers.{n}.feedforward_norm", _ALBERT_LAYER + "full_layer_layer_norm"),
    ),
    heads={
        "masked+sentence": Head(
            "AlbertForPreTraining",
            _ALBERT_MASKED + sentence_rows("sentence_head", "albert.pooler", "sop_classifier.classifier"),
        ),
        "masked": Head("AlbertForMaskedLM", _ALBERT_MASKED),
        "sequence": Head("AlbertForSequenceClassification", sentence_rows("head", "albert.pooler", "classifier")),
        "token": Head("AlbertForTokenClassification", both("head.output", "classifier")),
        "span": Head("AlbertForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head("AlbertModel"),
    },
)  # fmt: skip


def _electra(ours: str) -> tuple[Row, ...]:
    trunk = both(f"{ours}projection", "electra.embeddings_project") + encoder_layers("electra", ours=ours)
    return _embeddings("electra") + trunk


_ELECTRA_FIELDS = _FIELDS | {"embedding_size": "embedding_size"}
_DISCRIMINATOR = (
    *both("head.dense", "discriminator_predictions.dense"),
    *both("head.output", "discriminator_predictions.dense_prediction"),
)
_GENERATOR = masked_head(
    "generator_predictions.dense",
    "generator_predictions.LayerNorm",
    "generator_lm_head",
    "generator_lm_head.bias",
)
ELECTRA = Family(
    model_type="electra",
    base=PRESETS["electra-base"].changed({"generator": 0}),
    prefix="electra.",
    fields=_ELECTRA_FIELDS,
    constants=_NO_DROPOUT,
    writes=_typed,
    rows=_electra(""),
    heads={
        "discriminator": Head("ElectraForPreTraining", _DISCRIMINATOR),
        "masked": Head("ElectraForMaskedLM", _GENERATOR),
        "sequence": Head(
            "ElectraForSequenceClassification",
            sentence_rows("head", "classifier.dense", "classifier.out_proj"),
        ),
        "token": Head("ElectraForTokenClassification", both("head.output", "classifier")),
        "span": Head("ElectraForQuestionAnswering", both("head.output", "qa_outputs")),
        "none": Head("ElectraModel"),
    },
)

"""The model in a Hugging Face folder: converted to our configuration, or described to be run unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel, describe_hf_class
from workloads.hf.files.compressed_weights import METHOD, check_form
from workloads.hf.files.hf_config import (
    GENERATOR,
    FolderConfig,
    folder_config,
    method_of,
    quantisation_of,
    read_hf_config,
    root,
)
from workloads.hf.files.weight_files import Weights
from workloads.hf.files.weight_names import has_weights
from workloads.hf.tables.convert import ties, used
from workloads.hf.tables.decoders import rope_as_read
from workloads.hf.tables.families import by_model_type
from workloads.hf.tables.family import HF_ACTIVATIONS, Family
from workloads.model.config import TransformerConfig

HARMLESS = frozenset((
    # initialisation, and settings that act only in training
    "initializer_range", "initializer_factor", "init_std", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
    "attention_dropout", "activation_dropout", "dropout_rate", "hidden_dropout_prob", "classifier_dropout",
    "attention_probs_dropout_prob", "classifier_dropout_prob", "encoder_layerdrop", "decoder_layerdrop",
    "qa_dropout", "seq_classif_dropout", "pooler_dropout",
    "router_jitter_noise", "router_aux_loss_coef", "router_z_loss_coef",
    # token roles, which the tokenizer knows; RoBERTa's padding is read as its position offset
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id",
    # what is returned, cached, split or rounded, and who wrote the file
    "use_cache", "return_dict", "output_hidden_states", "output_router_logits", "add_router_probs", "dtype",
    "transformers_version", "architectures", "chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn",
    "router_dtype", "router_ignore_padding_tokens",
    # heads that are not converted
    "id2label", "label2id", "problem_type", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "summary_last_dropout", "num_nextn_predict_layers",
    "num_mtp_layers", "start_n_top", "end_n_top",
    # memory of earlier segments, which is read only if given
    "mem_len", "reuse_len", "same_length", "use_mems_eval", "use_mems_train",
    # tables that are filled at the beginning and are then weights, or that are absent
    "sinusoidal_pos_embds", "task_type_vocab_size",
    # derived from other fields: the step between layers with experts, activation and gate, windows
    "num_sparse_encoder_layers", "num_sparse_decoder_layers", "feed_forward_proj", "max_window_layers",
    "use_sliding_window", "original_max_position_embeddings", "pos_att_type", "max_relative_positions",
))  # fmt: skip
"""Fields of a transformers configuration that do not change what a loaded model computes."""
DERIVED = ("head_dim", "n_inner", "num_key_value_heads")
"""Sizes that may be absent and then follow from others."""
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0,
             "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 0.0, "truncate": True},
}  # fmt: skip
"""The fields that each kind of rotary positions uses, with their defaults."""


def check(family: Family, config: TransformerConfig, hf_config: Any) -> None:
    """Write `config`, which was read from `hf_config`, back and compare. Raises WorkloadError for a field that
    differs.
    """
    names = sorted(field.name for field in fields(type(hf_config)))
    # Vocabulary sizes are those at publication; beyond them transformers warns.
    tokens = {name: getattr(hf_config, name) for name in names if name.endswith("_token_id")}
    written_config = type(hf_config)(**{**tokens, **family.write_config(config)})
    for name in names:
        if name in HARMLESS or (name == "tie_word_embeddings" and "tied" in family.unsaid):
            continue
        read = _plain(getattr(hf_config, name, None))
        written = _plain(getattr(written_config, name, None))
        if name == "rope_parameters":
            read = rope_as_read(hf_config, read) if "rope_type" in read else read
            kinds = [read, written] if "rope_type" in written else None
            for stored, rewritten in [kinds] if kinds else [(read[kind], written[kind]) for kind in written]:
                _compare_rope(family, stored, rewritten)
        elif read != written and not (read is None and name in DERIVED):
            raise _unlike(family, name, read, written)


def _compare_rope(family: Family, read: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    kind = expected["rope_type"]
    known = {"rope_theta": None, "rope_type": "default", "partial_rotary_factor": 1.0, **_ROPE[kind]}
    for name, missing in known.items():
        stored = read.get(name)
        written = expected.get(name)
        stored, written = (missing if v is None else v for v in (stored, written))
        if stored is None and name in ("factor", "original_max_position_embeddings"):
            continue  # follows from the positions
        if stored != written:
            raise _unlike(family, f"rope_parameters.{name}", stored, written)


def _plain(value: Any) -> Any:
    """Return the value, with different names of one activation unified."""
    return HF_ACTIVATIONS.get(value, value) if isinstance(value, str) else value


def _unlike(family: Family, name: str, read: Any, written: Any) -> WorkloadError:
    return WorkloadError(
        f"{name} {read!r} of {family.model_type} is not supported here, only {written!r}; set it so in config.json "
        "if the weights were trained with it, or use another checkpoint"
    )


MXFP4 = "mxfp4"
"""transformers' name for what `workloads.hf.files.mxfp4` reads."""


def describe_folder(folder: str, kept: FolderConfig | None = None) -> TransformerConfig | HuggingFaceModel:
    """Return the model in `folder`, from the `kept` configuration if given, else from the folder's.

    A `HuggingFaceModel` if its class has no conversion table here.
    """
    kept = kept or folder_config(folder)
    hf_config = read_hf_config(folder, quantised=(MXFP4, METHOD), kept=kept)
    family = by_model_type(hf_config.model_type)
    if family is None or (method_of(hf_config) == MXFP4 and not family.in_4_bits):
        return describe_hf_class(folder, kept=kept)
    if method_of(hf_config) == METHOD:
        check_form(quantisation_of(hf_config), folder)
    try:
        config = _read(family, hf_config, str(root(folder)), kept.tied)
    except WorkloadError:
        if not family.or_as_it_is:
            raise
        return describe_hf_class(folder, kept=kept)
    if config.family == "electra" and kept.of_generator:
        generator = str(root(folder) / GENERATOR)
        return _with_generator(family, config, generator, kept.of_generator, kept.tied)
    return config


def _read(family: Family, hf_config: Any, folder: str, tied: bool | None) -> TransformerConfig:
    """Return the configuration of this project. Whether the embedding is `tied` is read from the weights if None."""
    config = family.read_config(hf_config)
    check(family, config, hf_config)
    if tied is None and has_weights(folder):
        tied = _tied(family, config, Weights(folder))
    return config if tied is None else config.changed({"tied": tied})


def _tied(family: Family, config: TransformerConfig, weights: Weights) -> bool:
    """Return whether the output projection is the embedding: as configured, unless the weights have two tables."""
    heads = family.heads.get("language") or family.heads["masked"]
    names = {row.names[0]: row for row in family.rows + heads.rows}
    head = names.get("head.weight") or names["head.output.weight"]
    if not ties(family, config):
        return config.tied
    if head.hf_name not in weights:
        return True
    embedding_names = [n for n in used(family, config, names["tokens.weight"]) if n in weights]
    return bool(embedding_names) and torch.equal(weights.read(embedding_names[0]), weights.read(head.hf_name))


def _with_generator(
    family: Family, config: TransformerConfig, folder: str, kept: FolderConfig, tied: bool | None
) -> TransformerConfig:
    """Return the configuration of both networks. Raises WorkloadError if the generator is not a narrower
    discriminator.
    """
    generator = _read(family, read_hf_config(folder, kept=kept), folder, tied)
    pair = config.changed({"generator": generator.hidden})
    expected = pair.generator_config()
    for name in (f.name for f in fields(expected) if f.name not in ("head", "tied", "head_dim", "kv_heads")):
        if getattr(generator, name) != getattr(expected, name):
            raise WorkloadError(
                f"the generator in {folder} has {name} {getattr(generator, name)!r}, but this discriminator needs "
                f"{getattr(expected, name)!r}; use a pair that was trained together"
            )
    return pair.changed({"tied": generator.tied})

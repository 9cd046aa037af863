"""Whether our configuration says all that theirs does: what it cannot say is refused, never left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.family import THEIR_ACTIVATIONS, Family
from workloads.model.config import TransformerConfig

HARMLESS = frozenset((
    # how the weights began, and what acts in training alone
    "initializer_range", "initializer_factor", "init_std", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
    "attention_dropout", "activation_dropout", "dropout_rate", "hidden_dropout_prob", "classifier_dropout",
    "attention_probs_dropout_prob", "classifier_dropout_prob", "encoder_layerdrop", "decoder_layerdrop",
    "router_jitter_noise", "router_aux_loss_coef", "router_z_loss_coef",
    # who is who among the tokens, which the tokenizer tells; RoBERTa's padding is read as its position offset
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id",
    # what is returned, kept, cut or rounded, and who wrote it
    "use_cache", "return_dict", "output_hidden_states", "output_router_logits", "add_router_probs", "dtype",
    "transformers_version", "architectures", "chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn",
    "router_dtype", "router_ignore_padding_tokens",
    # of heads that are not converted
    "id2label", "label2id", "problem_type", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "summary_last_dropout", "num_nextn_predict_layers",
    "num_mtp_layers",
    # what is read from what follows from it: the step between layers with experts, activation and gate, windows
    "num_sparse_encoder_layers", "num_sparse_decoder_layers", "feed_forward_proj", "max_window_layers",
))  # fmt: skip
"""Keys of their configurations that do not change what a loaded model computes."""
DERIVED = ("head_dim", "n_inner", "num_key_value_heads")
"""Sizes that may be left out, and follow from the others."""
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0,
             "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 0.0, "truncate": True},
}  # fmt: skip
"""What each kind of rotary positions reads, and what stands for a key that is not there."""


def check(family: Family, config: TransformerConfig, theirs: Any) -> None:
    """Write `config`, which was read from `theirs`, back and compare. Raises WorkloadError for a key that differs."""
    told = type(theirs)(**family.write_config(config))
    for name in sorted(field.name for field in fields(type(theirs))):
        if name in HARMLESS or (name == "tie_word_embeddings" and "tied" in family.unsaid):
            continue
        read, mine = _plain(getattr(theirs, name, None)), _plain(getattr(told, name, None))
        if name == "rope_parameters":
            _compare_rope(family, theirs, read, mine)
        elif read != mine and not (read is None and name in DERIVED):
            raise _unlike(family, name, read, mine)


def _compare_rope(family: Family, theirs: Any, read: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    kind = mine["rope_type"]
    known = {"rope_theta": None, "rope_type": "default", "partial_rotary_factor": 1.0, **_ROPE[kind]}
    for name, missing in known.items():
        found, written = read.get(name), mine.get(name)
        found, written = (missing if v is None else v for v in (found, written))
        if found is None and name in ("factor", "original_max_position_embeddings"):
            continue  # follows from the positions
        if found != written:
            raise _unlike(family, f"rope_parameters.{name}", found, written)


def _plain(value: Any) -> Any:
    """Several names of one activation are one value."""
    return THEIR_ACTIVATIONS.get(value, value) if isinstance(value, str) else value


def _unlike(family: Family, name: str, read: Any, mine: Any) -> WorkloadError:
    return WorkloadError(
        f"{name} {read!r} of {family.model_type} is not supported here, only {mine!r}; set it so in config.json "
        "if the weights were trained with it, or use another checkpoint"
    )

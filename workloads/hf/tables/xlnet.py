"""Conversion table of XLNet, whose projections are stored by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads.errors import WorkloadError
from workloads.hf.tables.family import Family, Head, Row, both, one
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS

FIXED = {"attn_type": "bi", "bi_data": False, "clamp_len": -1}
"""The only supported values of these fields; other values change the computation."""


def _read(hf_config: Any) -> dict[str, Any]:
    for name, wanted in FIXED.items():
        if (value := getattr(hf_config, name)) != wanted:
            raise WorkloadError(
                f"{name} {value!r} of xlnet is not supported here, only {wanted!r}; use another checkpoint"
            )
    return {"max_positions": getattr(hf_config, "n_positions", 512)}  # it affects no computation


def _write(config: TransformerConfig) -> dict[str, Any]:
    if config.positions != "relative_keys" or not config.head_bias:
        raise WorkloadError("XLNet has relative_keys and a bias of its head; set positions and head_bias")
    return {"d_head": config.hidden // config.heads, "n_positions": config.max_positions}


def _by_head(config: TransformerConfig) -> tuple[int, ...]:
    return (config.hidden, config.heads, config.head_dim)


def _row(
    ours: str, theirs: str, shape: Callable[[TransformerConfig], tuple[int, ...]], transposed: bool = True
) -> Row:
    return Row((ours,), theirs, transposed, theirs=shape)


_OURS = "layers.{n}."
_THEIRS = "transformer.layer.{n}."
XLNET = Family(
    model_type="xlnet",
    base=PRESETS["xlnet-base"],
    prefix="transformer.",
    fields={
        "vocab_size": "vocab_size", "hidden": "d_model", "layers": "n_layer", "heads": "n_head",
        "intermediate": "d_inner", "norm_eps": "layer_norm_eps", "activation": "ff_activation",
        "tied": "tie_word_embeddings",
    },
    constants={"dropout": 0.0, **FIXED},
    reads=_read,
    writes=_write,
    rows=(
        *one("tokens.weight", "transformer.word_embedding.weight"),
        _row("embeddings.query", "transformer.mask_emb", lambda config: (1, 1, config.hidden), False),
        *(
            _row(f"{_OURS}attention.{ours}.weight", f"{_THEIRS}rel_attn.{theirs}", _by_head)
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("distance", "r"))
        ),
        _row(f"{_OURS}attention.output.weight", f"{_THEIRS}rel_attn.o", _by_head, False),
        *(
            _row(f"{_OURS}attention.relative.{ours}", f"{_THEIRS}rel_attn.r_{theirs}_bias",
                 lambda config: (config.heads, config.head_dim), False)
            for ours, theirs in (("content", "w"), ("distance", "r"), ("segment", "s"))
        ),
        _row(f"{_OURS}attention.relative.segments", f"{_THEIRS}rel_attn.seg_embed",
             lambda config: (2, config.heads, config.head_dim)),
        *both(f"{_OURS}attention_norm", f"{_THEIRS}rel_attn.layer_norm"),
        *both(f"{_OURS}feedforward.up", f"{_THEIRS}ff.layer_1"),
        *both(f"{_OURS}feedforward.down", f"{_THEIRS}ff.layer_2"),
        *both(f"{_OURS}feedforward_norm", f"{_THEIRS}ff.layer_norm"),
    ),
    heads={
        "language": Head("XLNetLMHeadModel", (
            *one("head.weight", "lm_loss.weight"),
            *one("head.bias", "lm_loss.bias"),
        )),
        "none": Head("XLNetModel"),
    },
    or_as_it_is=True,
)  # fmt: skip

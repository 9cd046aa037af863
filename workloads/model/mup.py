"""Maximal update parametrisation (muP): hyperparameters tuned on a narrow model hold for a wide one.

Yang et al., 2022, "Tensor Programs V", arXiv 2203.03466. A configuration has a `base`, the narrow model for which
learning rate and initial standard deviation are tuned. The wide model's values follow from r = inputs / inputs in the
base, the factor by which a tensor's inputs grow. Tables 3 and 8 of the paper, for Adam and other optimizers that
normalise each gradient element (Lion):

  | tensors | standard deviation | learning rate |
  |---|---|---|
  | hidden: inputs and outputs grow | base / sqrt(r) | base / r |
  | outputs: only inputs grow (untied heads, routers) | base / r | base / r |
  | embeddings, vectors, others whose inputs do not grow | base | base |

Logits of a tied head are divided by r, because a tied weight begins and learns as an embedding (table 8). Logits of an
untied head are not, because its weight is smaller instead, which gives the same model (table 3). Attention scores are
divided by the head width instead of its root (definition 4.1), normalised so that they are unchanged at the base's
width. A model as wide as its base therefore equals the plain model bit for bit. Adam's epsilon is unchanged.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

WIDTHS = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "embedding_size",
    "generator",
    "latent",
    "moe",
)
"""The fields that may differ between a model and its base. In moe, only the intermediate size may."""


def with_base(config: TransformerConfig, widths: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration with a base model: itself with other `widths`, which are fields as in `changed`.

    Raises WorkloadError for a field that is not in WIDTHS, or for inconsistent sizes.

    Args:
        config: the wide model.
        widths: the base's sizes.
    """
    experts = widths.get("moe") or {}
    inside = (
        [f"moe.{name}" for name in experts if name != "intermediate"]
        if isinstance(experts, Mapping)
        else ["moe"]
    )
    if others := [*(name for name in widths if name not in WIDTHS), *inside]:
        raise WorkloadError(
            f"mup.{others[0]} is not a width; it takes the base model's {', '.join(WIDTHS[:-1])} and moe.intermediate"
        )
    if config.scaled_embedding or config.norm == "rms_offset":
        raise WorkloadError(
            f"mup does not know how embeddings and norms of {config.family} scale; set mup to null"
        )
    return replace(config, base=config.changed(widths))


def lr_scale(name: str, shape: Sequence[int], base: Sequence[int]) -> float:
    """Return the learning-rate factor of tensor `name` [.., outputs, inputs]; `base` is its shape in the base model.

    Args:
        name: name of the tensor.
        shape: its shape.
        base: its shape in the base model.
    """
    is_embedding = name in ("tokens.weight", "distances.weight") or "embeddings." in name
    is_vector = len(shape) < 2 or name.endswith("_bias")  # expert biases are one vector per expert
    # Adam's update has size 1 in every element, so a product with it sums `inputs` terms and grows with them: the rate
    # shrinks by the same factor (Yang et al., 2022, table 8).
    return 1.0 if is_vector or is_embedding else base[-1] / shape[-1]


def std_scale(name: str, shape: Sequence[int], base: Sequence[int]) -> float:
    """Return the factor of the standard deviation of a tensor's initial values.

    Args:
        name: name of the tensor.
        shape: its shape, [.., outputs, inputs].
        base: its shape in the base model.
    """
    scale = lr_scale(name, shape, base)
    # An output layer of fixed width has variance 1 / inputs^2, hidden ones 1 / inputs (table 8).
    return scale if len(shape) > 1 and shape[-2] == base[-2] else sqrt(scale)


def score_scale(config: TransformerConfig) -> float:
    """Return the factor of the scores of multi-head attention."""
    base = config.base or config
    products = 3 if config.disentangled else 1
    base_scale = base.attention_scale or (products * base.head_dim) ** -0.5
    # 1 / d instead of 1 / sqrt(d): query and key become correlated in training, so their product grows with d (Yang et
    # al., 2022, definition 4.1).
    return base_scale * (base.head_dim / config.head_dim)


def latent_score_scale(config: TransformerConfig) -> float:
    """Return the factor of the scores of latent attention, without YaRN's temperature."""
    widths = [c.latent.nope_dim + c.latent.rope_dim for c in (config.base or config, config) if c.latent]
    return widths[0] ** -0.5 * (widths[0] / widths[1])


def logit_scale(config: TransformerConfig) -> float:
    """Return the factor of the hidden states before the projection to the vocabulary."""
    base = config.base or config
    scale = base.hidden**-0.5 if config.scaled_head else 1.0
    return scale * (base.embedding_size / config.embedding_size) if config.tied else scale


RELATIVE_BIASES = tuple(f"attention.relative.{each}" for each in ("content", "distance", "segment"))
"""The vectors that XLNet adds to the queries of a score."""


def folded(config: TransformerConfig, name: str) -> float:
    """Return the factor of tensor `name` with which the model without a base computes the same (for an export).

    Score factors are folded into the queries, logit factors into the norm before the projection; both are linear.
    Raises WorkloadError if there is no such norm.

    Args:
        config: the model.
        name: name of the tensor.
    """
    if config.base is None:
        return 1.0
    plain = replace(config, base=None)
    module = name.rpartition(".")[0]
    if module.endswith(_query(config)) or name.endswith(RELATIVE_BIASES):
        if config.latent:
            return latent_score_scale(config) / latent_score_scale(plain)
        return score_scale(config) / score_scale(plain)
    if config.head in ("language", "masked") and logit_scale(config) != logit_scale(plain):
        return logit_scale(config) / logit_scale(plain) if module == _last_norm(config) else 1.0
    return 1.0


def _query(config: TransformerConfig) -> str:
    """Return the last linear map of the queries before the scores. Rotations come after it and
    commute with the factor.
    """
    if config.latent:
        return "attention.query_up" if config.latent.query_rank else "attention.query"
    return "attention.query_norm" if config.qk_norm else "attention.query"


def _last_norm(config: TransformerConfig) -> str:
    if config.head == "masked":
        return "head.norm"
    seq2seq = config.architecture == "encoder-decoder"
    stack = "decoder." if seq2seq else ""
    if config.final_norm:
        return f"{stack}norm"
    if config.norm_position == "pre" or config.shared_layers:
        raise WorkloadError(
            "mup scales the logits of a tied head, but no norm before it could absorb the scale; "
            "set tied: false or checkpoint.export to null"
        )
    return f"{stack}layers.{(config.decoder_layers if seq2seq else config.layers) - 1}.feedforward_norm"

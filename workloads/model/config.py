"""The configuration of a transformer; imports no torch, so planning starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from workloads.errors import WorkloadError
from workloads.model.parts import LatentAttention, MoE, RopeScaling, check_types

ARCHITECTURES = ("decoder", "encoder", "encoder-decoder", "prefix")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
MOST_LAYERS = 10_000
"""The maximum number of layers. A larger number is almost certainly a typing error, and each layer is built (on the
meta device) before a run is planned.
"""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "architecture": ARCHITECTURES,
    "norm": ("layer", "rms", "rms_offset"),
    "norm_position": ("pre", "post", "both", "branch"),
    "positions": ("learned", "sinusoidal", "rotary", "relative", "relative_keys", "none"),
    "activation": ACTIVATIONS,
    "head_activation": ("", *ACTIVATIONS),
    "head": ("language", "masked", "discriminator", "sequence", "token", "span", "none"),
    "pooler": ("tanh", "gelu", "relu"),
    "initial": ("normal", "truncated", "fan_in"),
}


@dataclass(frozen=True)
class TransformerConfig:
    """All options of a transformer. A size of zero means the usual value, derived from the others.

    Body and positions:

    family: the published class; it selects the Hugging Face conversion table. max_positions: the longest sequence that
    learned positions allow (and that rotary models declare). counted_positions: positions count only real tokens; the
    padding's id is position_offset - 1 (RoBERTa). positions: with relative_keys, keys of distances are projected
    sinusoids, and a second stream of queries does not see its own tokens (XLNet). relative_bias: adds T5's bias by
    distance to the scores, besides other positions (MPNet). disentangled: the number of distance buckets on each side,
    up to relative_distance, for DeBERTa V2's disentangled attention; 0 for none. task_types: the number of task
    embeddings that are added to the tokens (ERNIE 2.0).

    Norms and scores:

    norm: rms_offset is RMSNorm that stores its weight minus one (Gemma). norm_position: the norm applies to a
    sub-layer's input (pre), to the residual after it (post), to its input and its output (both, Gemma 2), or to its
    output alone (branch, OLMo 2). qk_norm_whole: the norms of queries and keys span all heads (OLMo 2). score_cap,
    logit_cap: c in c tanh(x / c) of scores and logits, 0 for none (Gemma 2). sinks: each head has a learned score in
    the denominator of its softmax, without a value (gpt-oss).

    Windows and sparse attention:

    full_every: every n-th layer has no window; 0 for none. window_theta: rope_theta of layers with a window, whose
    rotary positions are not scaled; 0 to use the same as all layers (Gemma 3). window, window_dilation, global_tokens,
    random_blocks, block_size: the sparse mask, see `workloads.model.sparse`.

    Feed-forward, heads and training:

    swiglu_limit: clamps gate and up and joins them with swiglu_alpha as in gpt-oss, see `layers.joined`; 0 for plain
    gates. head_bias: whether a language head has a bias. head_activation: the activation of a masked head; the body's
    if empty. dropout, attention_dropout: the rates in training. layer_drop: the rate of skipped layers.
    embedding_noise: the alpha of NEFTune. See `workloads.model.dropout`. head_gates: each head has a gate, see
    `workloads.model.head_gates`. base: the narrow model for muP, None for none;
    see `workloads.model.mup`.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int
    decoder_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_position: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    scaled_embedding: bool = False
    positions: str = "learned"
    position_offset: int = 0
    counted_positions: bool = False
    block_positions: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    relative_bias: bool = False
    disentangled: int = 0
    relative_buckets: int = 32
    relative_distance: int = 128
    token_types: int = 0
    task_types: int = 0
    embedding_size: int = 0
    tied: bool = True
    scaled_head: bool = False
    head_bias: bool = False
    activation: str = "gelu"
    gated: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    attention_bias: bool = True
    output_bias: bool = True
    feedforward_bias: bool = True
    attention_scale: float = 0.0
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sinks: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    window: int = 0
    window_dilation: int = 1
    full_every: int = 0
    window_theta: float = 0.0
    global_tokens: int = 0
    random_blocks: int = 0
    block_size: int = 64
    shared_layers: bool = False
    latent: LatentAttention | None = None
    moe: MoE | None = None
    head: str = "language"
    head_activation: str = ""
    sentence_head: bool = False
    classes: int = 0
    pooler: str = "tanh"
    generator: int = 0
    initial: str = "normal"
    initial_std: float = 0.02
    residual_scaling: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_drop: float = 0.0
    embedding_noise: float = 0.0
    head_gates: bool = False
    base: TransformerConfig | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise WorkloadError(f"{name} {value!r} is unknown; use one of {', '.join(allowed)}")
        for name in ("vocab_size", "hidden", "layers", "heads", "intermediate", "max_positions"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.layers > MOST_LAYERS:
            raise WorkloadError(f"layers is {self.layers}; give at most {MOST_LAYERS}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise WorkloadError(
                    f"hidden {self.hidden} is not a multiple of heads {self.heads}; choose heads that divide it"
                    " or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        self._check_attention()
        self._check_window()
        self._check_positions()
        self._check_distances()
        self._check_shape()

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise WorkloadError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one"
            )
        if self.latent and self.positions != "rotary":
            raise WorkloadError("latent attention needs rotary positions; set positions: rotary")
        if self.latent and (self.qk_norm or self.window or self.score_cap or self.sinks):
            raise WorkloadError("latent attention has no qk_norm, window, score_cap or sinks; remove them")
        if self.sinks and self.architecture == "encoder-decoder":
            raise WorkloadError("an encoder-decoder has no sinks; set sinks to false")
        if self.swiglu_limit and not (self.gated and self.activation == "silu"):
            raise WorkloadError("swiglu_limit needs gated: true and activation: silu; set it to 0")
        if self.qk_norm_whole and not (self.qk_norm and self.norm == "rms"):
            raise WorkloadError("qk_norm_whole needs qk_norm and norm: rms; give both")
        if self.generator and (self.biased_by_distance or self.disentangled or self.task_types):
            raise WorkloadError(
                "a generator and its discriminator have learned positions alone, and no task_types"
            )
        if self.task_types and self.architecture == "encoder-decoder":
            raise WorkloadError("an encoder-decoder has no task_types; set it to 0")

    def _check_window(self) -> None:
        if self.full_every and (
            not self.window or self.shared_layers or self.architecture == "encoder-decoder"
        ):
            raise WorkloadError(
                "full_every needs a window, and layers of one stack that are not shared; set it to 0"
            )
        if self.window_theta and not (self.full_every and self.positions == "rotary"):
            raise WorkloadError("window_theta needs rotary positions and full_every; set it to 0")
        for name, usual in (("global_tokens", 0), ("random_blocks", 0), ("window_dilation", 1)):
            if getattr(self, name) < usual:
                raise WorkloadError(f"{name} is {getattr(self, name)}; give at least {usual}")
            if getattr(self, name) > usual and not self.window:
                raise WorkloadError(f"{name} does nothing without window; set window")
        if self.block_size < 1:
            raise WorkloadError(f"block_size is {self.block_size}; give at least 1")

    def _check_positions(self) -> None:
        if self.positions == "rotary" and self.rotary_dim % 2:
            raise WorkloadError(f"rotary positions need an even head_dim, not {self.rotary_dim}; change it")
        if self.rope_scaling and self.positions != "rotary":
            raise WorkloadError(f"rope_scaling does nothing with {self.positions} positions; remove it")
        if self.counted_positions and (self.positions != "learned" or not self.position_offset):
            raise WorkloadError("counted_positions needs learned positions and a position_offset; give both")
        if self.block_positions and self.positions != "learned":
            raise WorkloadError("block_positions needs learned positions; set positions: learned")

    def _check_distances(self) -> None:
        """Check the ways in which attention scores depend on the distance between tokens."""
        if self.relative_bias and self.positions == "relative":
            raise WorkloadError("relative positions have their bias already; set relative_bias to false")
        if self.disentangled and (
            self.architecture not in ("encoder", "prefix")
            or self.biased_by_distance
            or self.qk_norm
            or self.positions in ("rotary", "relative_keys")
            or self.kv_heads != self.heads
        ):
            raise WorkloadError(
                "disentangled attention needs an encoder with as many key as query heads, positions learned or none, "
                "and no other bias or qk_norm; set disentangled to 0"
            )
        if self.disentangled and not 4 <= self.disentangled < self.relative_distance:
            raise WorkloadError(
                f"disentangled is {self.disentangled}; give at least 4 buckets, and fewer than relative_distance"
            )
        if self.positions == "relative_keys" and (
            self.architecture not in ("encoder", "prefix")
            or self.relative_bias
            or self.qk_norm
            or self.kv_heads != self.heads
            or self.full_every
            or self.generator
            or self.sinks
        ):
            raise WorkloadError(
                "relative_keys need an encoder with as many key as query heads, alike in all layers, and no other "
                "bias, qk_norm, sinks or generator; change positions"
            )
        if (self.biased_by_distance or self.disentangled) and (
            self.latent or self.full_every or self.block_positions
        ):
            raise WorkloadError(
                "a bias by distance needs plain attention, the same in all layers, and one position a token; "
                "set latent "
                "to null, full_every to 0 and block_positions to false"
            )

    def _check_shape(self) -> None:
        seq2seq = self.architecture == "encoder-decoder"
        if seq2seq:
            object.__setattr__(self, "decoder_layers", self.decoder_layers or self.layers)
            if self.head not in ("language", "none"):
                raise WorkloadError(f"an encoder-decoder has no {self.head} head; set head: language")
            if self.embedding_size != self.hidden or self.head_bias:
                raise WorkloadError(
                    "an encoder-decoder embeds tokens in hidden numbers, and its head has no bias; "
                    "leave out embedding_size and head_bias"
                )
        elif self.decoder_layers:
            raise WorkloadError(f"{self.architecture} has no decoder_layers; set layers instead")
        if self.shared_layers and (seq2seq or self.moe):
            raise WorkloadError("shared_layers needs an encoder or decoder without moe; remove one of them")
        if self.tied and self.head == "language" and self.embedding_size != self.hidden:
            raise WorkloadError(
                "a tied language head needs embedding_size equal to hidden; use head: masked or tied: false"
            )
        if self.head in ("sequence", "token", "span") and self.classes < (
            1 if self.head == "sequence" else 2
        ):
            raise WorkloadError(f"a {self.head} head needs classes of at least 2; set classes")
        if self.sentence_head and self.architecture not in ("encoder", "prefix"):
            raise WorkloadError(f"{self.architecture} has no sentence_head; use an encoder")
        if self.generator and (self.head != "discriminator" or self.hidden % self.generator):
            raise WorkloadError(
                "generator (its hidden size) must divide hidden and needs head: discriminator; change it"
            )

    divided_by: ClassVar[Literal["rules"]] = "rules"
    has_blocks: ClassVar[bool] = True

    @property
    def as_transformer(self) -> TransformerConfig:
        """See `workloads.describe.Description`."""
        return self

    @property
    def ends_in_head(self) -> bool:
        """See `workloads.describe.Description`."""
        return not self.generator

    def training_notes(self, name: str, length: int, dropout: float) -> list[str]:
        """Return one line if a sequence has more tokens than the model declares positions, though it can compute them.

        See `workloads.describe.Description`.

        Args:
            name: name of the model, for the message.
            length: tokens of a training sequence.
            dropout: the rate in training; not read by this kind of model.
        """
        declared = self.max_positions
        if length <= declared or self.positions not in ("rotary", "sinusoidal"):
            return []
        remedy = " or workload.changes.rope_scaling" if self.positions == "rotary" else ""
        return [
            f"a text of {length} tokens exceeds the {declared} positions that {name} declares, and the export would "
            f"declare {declared}, too: set workload.changes.max_positions to {length}; weights that were trained at "
            f"{declared} may need more training{remedy}"
        ]

    @property
    def rotary_dim(self) -> int:
        """Return the dimensions of a head to which rotary positions apply."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def is_sparse(self) -> bool:
        """Return whether the mask is more than a plain window, so that no fused kernel supports it."""
        return bool(self.window) and bool(
            self.global_tokens or self.random_blocks or self.window_dilation > 1
        )

    @property
    def biased_by_distance(self) -> bool:
        """Return whether scores have T5's bias by distance."""
        return self.relative_bias or self.positions == "relative"

    @property
    def causal(self) -> bool:
        """Return whether a token attends only to preceding tokens, unless the batch has its own mask."""
        return self.architecture == "decoder"

    @property
    def all_layers(self) -> int:
        """Return the number of layers of encoder and decoder together."""
        return self.layers + self.decoder_layers

    def generator_config(self) -> TransformerConfig:
        """Return the configuration of ELECTRA's generator.

        It has the same depth and hidden size `generator`; heads and feed-forward shrink in proportion.
        """
        ratio = self.hidden // self.generator
        return replace(
            self,
            hidden=self.generator,
            heads=max(1, self.heads // ratio),
            kv_heads=0,
            head_dim=0,
            intermediate=self.intermediate // ratio,
            embedding_size=self.embedding_size,
            head="masked",
            generator=0,
            base=self.base and self.base.generator_config(),
        )

    def changed(self, changes: Mapping[str, Any]) -> TransformerConfig:
        """Return a copy with `changes`. A mapping for moe, latent or rope_scaling is merged with the present values.
        Positions may have transformers' names, see `positions_by_our_names`.

        Raises WorkloadError for an unknown field.
        """
        changes = positions_by_our_names(changes)
        known = {f.name for f in fields(self)} - {
            *("base", "dropout", "attention_dropout", "layer_drop", "embedding_noise", "head_gates"),
        }
        nested = {"moe": MoE, "latent": LatentAttention, "rope_scaling": RopeScaling}
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise WorkloadError(f"unknown model field {name!r}; known are {', '.join(sorted(known))}")
            if name in nested and isinstance(value, Mapping):
                value = _merged(nested[name], getattr(self, name), name, value)
            values[name] = value
        check_types(self, values)
        # A size that was derived from another one is derived again when that one changes.
        if "heads" in values and self.kv_heads == self.heads:
            values.setdefault("kv_heads", 0)
        if {"heads", "hidden"} & values.keys() and self.head_dim * self.heads == self.hidden:
            values.setdefault("head_dim", 0)
        if "hidden" in values and self.embedding_size == self.hidden:
            values.setdefault("embedding_size", 0)
        if "layers" in values and self.decoder_layers == self.layers:
            values.setdefault("decoder_layers", 0)
        try:
            return replace(self, **values)
        except TypeError as error:
            raise WorkloadError(
                f"a model field has the wrong type: {error}; see TransformerConfig"
            ) from error


THEIR_POSITIONS = {"max_position_embeddings": "max_positions", "rope_parameters": "rope_scaling"}
"""Our fields of a model by their names in transformers."""
THEIR_SCALING = {
    "rope_type": "kind",
    "type": "kind",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "mscale_all_dim": "mscale_all",
}
"""The fields of `RopeScaling` by their names in transformers, where these differ."""


def positions_by_our_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `changes` with our names for positions and their scaling, where they have those of transformers.

    A rope_type of "default" removes the scaling. A rope_theta among the scaling's fields sets the model's rope_theta.
    Raises WorkloadError for a field that is given under both names.
    """
    renamed: dict[str, Any] = {}

    def put(fields: dict[str, Any], name: str, value: Any, prefix: str) -> None:
        if name in fields:
            raise WorkloadError(
                f"{prefix}{name} is given twice, by our name and by transformers'; give it once"
            )
        fields[name] = value

    for key, value in changes.items():
        name = THEIR_POSITIONS.get(key, key)
        if name != "rope_scaling" or not isinstance(value, Mapping):
            put(renamed, name, value, "")
            continue
        scaling: dict[str, Any] = {}
        for field, each in value.items():
            if field == "rope_theta":
                put(renamed, field, each, "")
            else:
                put(scaling, THEIR_SCALING.get(str(field), str(field)), each, "rope_scaling.")
        put(renamed, name, None if scaling.get("kind") == "default" else scaling, "")
    return renamed


def _merged(kind: type, old: Any, name: str, value: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(value) - known):
        raise WorkloadError(f"unknown field {name}.{unknown[0]}; known are {', '.join(sorted(known))}")
    check_types(kind, value, f"{name}.")
    try:
        return replace(old, **value) if old is not None else kind(**value)
    except TypeError as error:
        raise WorkloadError(f"{name} is incomplete: {error}; give every size of it") from error

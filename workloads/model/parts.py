"""The nested parts of a configuration: rotary scaling, latent attention and mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from workloads.errors import WorkloadError

PLAIN: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "int": ("a whole number", lambda value: type(value) is int),
        "float": ("a number", lambda value: type(value) in (int, float) and math.isfinite(value)),
        "bool": ("true or false", lambda value: type(value) is bool),
        "str": ("a text", lambda value: type(value) is str),
    }
)
"""The name of each plain field type in words, and a test whether a value has the type."""


def check_types(kind: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise WorkloadError for the first value of a dataclass that does not have the plain type of its field.

    Args:
        kind: the dataclass, or an instance of it.
        values: by field.
        prefix: of the field's name in the message.
    """
    for each in fields(kind):
        type_name, is_one = PLAIN.get(str(each.type), ("", bool))
        if type_name and each.name in values and not is_one(values[each.name]):
            raise WorkloadError(f"{prefix}{each.name} should be {type_name}, but is {values[each.name]!r}")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind: 'linear' (Chen et al. 2023), 'llama3' (Llama 3.1) or 'yarn' (Peng et al. 2023). The last two start from
    original_positions, the length of the original training. YaRN only: attention_factor multiplies cosine and sine, 0
    derives it from the factor; without `truncate`, the ends of the ramp are not rounded to whole indices.
    """

    kind: str
    factor: float
    original_positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise WorkloadError(f"rope_scaling.kind {self.kind!r} is unknown; use linear, llama3 or yarn")
        if self.factor < 1:
            raise WorkloadError(f"rope_scaling.factor is {self.factor}; give at least 1")
        if self.kind == "linear" and self.original_positions:
            raise WorkloadError("rope_scaling.original_positions is for llama3 and yarn; leave it out")
        if self.kind != "linear" and not self.original_positions:
            raise WorkloadError(
                f"rope_scaling of kind {self.kind} needs original_positions; give the length of the original training"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): low-rank queries, keys and values.

    query_rank 0 means a full-rank query projection. norm_eps is the epsilon of the norms of the low-rank vectors.
    """

    query_rank: int
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class MoE:
    """A feed-forward block of experts, in every `every`-th layer from layer `first` on.

    gate: 'softmax' (Switch, Mixtral) or 'sigmoid' (DeepSeek-V3). capacity: the maximum number of tokens of each
    sequence that an expert takes. capacity_factor: the same as ceil(factor * length * top_k / experts) (Switch, eq. 3).
    Without either, an expert takes all tokens that choose it. shared: the number of experts that process every token,
    computed as one expert. shared_gate: weights them with the sigmoid of a linear map of the token (Qwen2-MoE). bias:
    router and experts have biases (gpt-oss). groups, top_groups: the router first keeps the best groups of experts
    (DeepSeek-V3, section 2.1.2). auxiliary and z_loss are the weights of the balancing loss and of the router z-loss of
    each layer. bias_rate is the step of the auxiliary-loss-free bias; None for no bias.
    """

    experts: int
    top_k: int
    intermediate: int
    every: int = 1
    first: int = 0
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    gate: str = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity_factor: float | None = None
    capacity: int | None = None
    auxiliary: float = 0.0
    z_loss: float = 0.0
    bias_rate: float | None = None

    def __post_init__(self) -> None:
        if self.gate not in ("softmax", "sigmoid"):
            raise WorkloadError(f"moe.gate {self.gate!r} is unknown; use softmax or sigmoid")
        if not 1 <= self.top_k <= self.experts:
            raise WorkloadError(f"moe.top_k is {self.top_k}; give 1 to moe.experts ({self.experts})")
        if self.shared_gate and not self.shared:
            raise WorkloadError("moe.shared_gate needs shared experts; set moe.shared")
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise WorkloadError(
                f"moe.experts {self.experts} cannot be divided into {self.groups} groups from which "
                f"{self.top_groups} are chosen; choose moe.groups that divide moe.experts and moe.top_groups "
                "up to moe.groups"
            )
        if self.top_k > self.experts // self.groups * self.top_groups:
            raise WorkloadError("moe.top_k exceeds the experts in moe.top_groups groups; lower moe.top_k")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise WorkloadError("moe.capacity_factor must be positive; give null for a dropless router")
        if self.capacity is not None and (self.capacity < 1 or self.capacity_factor is not None):
            raise WorkloadError(
                "moe.capacity is a number of tokens, at least 1, and replaces capacity_factor; "
                "set one of the two to null"
            )

    def at_length(self, length: int) -> int | None:
        """Return the maximum number of tokens that an expert takes of a sequence of that length; None for no limit."""
        if self.capacity_factor is None:
            return self.capacity
        return math.ceil(self.capacity_factor * length * self.top_k / self.experts)

    def routed(self, layers: int) -> int:
        """Return how many of `layers` layers have experts."""
        return sum(map(self.at, range(layers)))

    def at(self, layer: int) -> bool:
        """Return whether layer `layer` has experts."""
        return layer >= self.first and (layer - self.first) % self.every == 0

"""A smaller model with the weights of a larger one: some of its layers, feed-forward columns and attention heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig
from workloads.model.depth_stacking import LAYER
from workloads.model.stored import Part, StoredTensor, StoredWeights

SIZES = ("layers", "decoder_layers", "intermediate", "heads", "kv_heads")
"""The fields of a model in which it may be smaller than its base."""
Layers = Literal["uniform", "first", "last"] | Sequence[int]
"""Which layers are kept: evenly spread ones, those at the beginning or at the end, or these numbers."""
UP = ("feedforward.up", "feedforward.gate")
ATTENTION = ("attention", "cross_attention")


@dataclass(frozen=True)
class Kept:
    """The parts of a base that a smaller model keeps, by their numbers in the base, ascending.

    Attributes:
        layers: for each stack ("" or "encoder." and "decoder."), the layers.
        columns: for each kept layer's feed-forward network by its name in the base, such as layers.3.feedforward, the
            columns; empty if all are kept.
        groups: for each kept attention by its name in the base, such as layers.3.attention, the groups of heads that
            share a key and a value; empty if all are kept.
    """

    layers: Mapping[str, Sequence[int]]
    columns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        parts = {"layers": self.layers, "columns": self.columns, "groups": self.groups}
        return {key: {name: list(numbers) for name, numbers in part.items()} for key, part in parts.items()}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Kept:
        """Return the selection that `to_json` wrote."""
        return cls(data["layers"], data["columns"], data["groups"])


def base_of_size(config: TransformerConfig, theirs: TransformerConfig) -> TransformerConfig:
    """Return the model of `config` in the sizes of its base, after checking that it can be a part of it.

    Raises:
        WorkloadError: it is not smaller, or its parts cannot be taken out of such a model.

    Args:
        config: the smaller model.
        theirs: the base.
    """
    more = [name for name in SIZES if getattr(config, name) > getattr(theirs, name)]
    if more:
        name = more[0]
        raise WorkloadError(
            f"{name} is {getattr(config, name)}, but the base has {getattr(theirs, name)}; lower it"
        )
    fewer = {name for name in SIZES if getattr(config, name) < getattr(theirs, name)}
    if not fewer:
        raise WorkloadError(
            f"the model is as large as its base; give smaller {', '.join(SIZES)} in workload.changes, or leave out "
            "workload.shrink"
        )
    if fewer & {"heads", "kv_heads"}:
        _check_heads(config, theirs)
    if "intermediate" in fewer and theirs.moe:
        raise WorkloadError(
            "shrink cannot choose columns of experts; set workload.changes.intermediate to the base's"
        )
    if fewer & {"layers", "decoder_layers"} and (theirs.shared_layers or theirs.generator):
        raise WorkloadError(
            "shrink cannot choose among layers that share weights or belong to two networks; set "
            "workload.changes.layers to the base's"
        )
    return replace(config, head_dim=theirs.head_dim, **{name: getattr(theirs, name) for name in SIZES})


def _check_heads(config: TransformerConfig, theirs: TransformerConfig) -> None:
    if config.head_dim != theirs.head_dim:
        raise WorkloadError(
            f"heads keep their size, which is {theirs.head_dim} in the base and {config.head_dim} in the model; set "
            f"workload.changes.head_dim to {theirs.head_dim}"
        )
    if config.heads * theirs.kv_heads != theirs.heads * config.kv_heads:
        ratio = theirs.heads // theirs.kv_heads
        raise WorkloadError(
            f"heads that share a key are kept or removed together, {ratio} of them in the base; set "
            f"workload.changes.heads to {ratio} times kv_heads"
        )
    apart = {
        "latent attention": theirs.latent is not None,
        "a bias by distance for each head": theirs.biased_by_distance,
        "disentangled attention": bool(theirs.disentangled),
        "keys of distances": theirs.positions == "relative_keys",
        "a norm that spans all heads": theirs.qk_norm_whole,
    }
    if reason := next((name for name, is_there in apart.items() if is_there), None):
        raise WorkloadError(
            f"the base has {reason}, so heads cannot be removed; set workload.changes.heads to that of the base"
        )


def chosen_layers(choice: Layers, base_layers: int, count: int) -> list[int]:
    """Return the numbers of the layers that are kept of a stack of `base_layers` layers, ascending.

    uniform is layer i * base_layers // count for the i-th of `count` layers: every other layer for half of them (Fan
    et al., 2020, "Reducing Transformer Depth on Demand with Structured Dropout", section 3.3).

    Raises:
        WorkloadError: the numbers are not those of `count` layers.

    Args:
        choice: how layers are chosen.
        base_layers: layers of the base.
        count: layers of the smaller model.
    """
    if choice == "uniform":
        return [i * base_layers // count for i in range(count)]
    if choice == "first":
        return list(range(count))
    if choice == "last":
        return list(range(base_layers - count, base_layers))
    numbers = [int(number) for number in choice]
    if (
        numbers != sorted(set(numbers))
        or len(numbers) != count
        or not 0 <= numbers[0] <= numbers[-1] < base_layers
    ):
        raise WorkloadError(
            f"layers {numbers} are not {count} ascending numbers below {base_layers}; the model has {count} "
            f"layers, and its base {base_layers}"
        )
    return numbers


def kept_layers(
    config: TransformerConfig, base: TransformerConfig, layers: Layers, decoder_layers: Layers | None = None
) -> dict[str, list[int]]:
    """Return the kept layers by stack, see `Kept.layers`.

    Raises:
        WorkloadError: a layer would become one of another kind (with experts, without a window).

    Args:
        config: the smaller model.
        base: the base.
        layers: how layers are chosen, in the encoder of two stacks.
        decoder_layers: how those of a decoder are chosen; None for the same way.
    """
    if config.architecture == "encoder-decoder":
        return {
            "encoder.": chosen_layers(layers, base.layers, config.layers),
            "decoder.": chosen_layers(decoder_layers or layers, base.decoder_layers, config.decoder_layers),
        }
    kept = chosen_layers(layers, base.layers, config.layers)
    for new, old in enumerate(kept):
        if base.full_every and ((new + 1) % base.full_every == 0) != ((old + 1) % base.full_every == 0):
            raise WorkloadError(
                f"layer {old} of the base becomes layer {new}, but only one of them has a window, which every "
                f"{base.full_every}th lacks; name other layers"
            )
        if base.moe and base.moe.at(new) != base.moe.at(old):
            raise WorkloadError(
                f"layer {old} of the base becomes layer {new}, but only one of them has experts; name other layers"
            )
    return {"": kept}


def kept_units(
    config: TransformerConfig,
    base: TransformerConfig,
    layers: Mapping[str, Sequence[int]],
    scores: Mapping[str, Tensor],
) -> Kept:
    """Return the layers, and of each of them the columns and groups of heads with the largest scores.

    Every layer keeps equally many. Among equal scores the first numbers are kept.

    Args:
        config: the smaller model.
        base: the base.
        layers: see `Kept.layers`.
        scores: by the names of `Kept.columns` and `Kept.groups`, a score for each unit of the base.
    """

    def best(name: str, count: int) -> list[int]:
        order = scores[name].double().argsort(descending=True, stable=True)
        return sorted(order[:count].tolist())

    columns = {}
    groups = {}
    for stack, numbers in layers.items():
        for number in numbers:
            layer = f"{stack}layers.{number}"
            if config.intermediate < base.intermediate:
                columns[f"{layer}.feedforward"] = best(f"{layer}.feedforward", config.intermediate)
            if config.kv_heads < base.kv_heads:
                for name in (f"{layer}.{attention}" for attention in ATTENTION):
                    if name in scores:
                        groups[name] = best(name, config.kv_heads)
    return Kept(layers, columns, groups)


@dataclass(frozen=True)
class Shrunk:
    """The weights of a base for a smaller model, see `StoredWeights`.

    Attributes:
        stored: the weights of the base.
        config: the smaller model.
        base: the base, with the heads of the smaller model.
        shapes: the shapes of the smaller model's tensors.
        layers: see `Kept.layers`.
        kept: what is kept; None until it is chosen: the weights cannot be read before.
    """

    stored: StoredWeights
    config: TransformerConfig
    base: TransformerConfig
    shapes: Mapping[str, torch.Size]
    layers: Mapping[str, Sequence[int]]
    kept: Kept | None = None

    @property
    def has_choice(self) -> bool:
        """Whether columns or heads are chosen too, besides layers."""
        return self.config.intermediate < self.base.intermediate or self.config.kv_heads < self.base.kv_heads

    def keeping(self, kept: Kept) -> Shrunk:
        """Return the weights with the choice made."""
        return replace(self, kept=kept)

    @property
    def notes(self) -> Sequence[str]:
        """See `StoredWeights`."""
        sizes = [f"{n} {getattr(self.base, n)} to {getattr(self.config, n)}" for n in SIZES
                 if getattr(self.base, n) != getattr(self.config, n)]  # fmt: skip
        return (*self.stored.notes, f"the model is a part of its base: {', '.join(sizes)}")

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        match = LAYER.match(name)
        if match is None:
            return self.stored.find(name)
        if self.kept is None:
            return _Unchosen(self.shapes[name])
        layer = f"{match[1]}layers.{self.kept.layers[match[1]][int(match[2])]}"
        tensor = self.stored.find(f"{layer}.{match[3]}")
        if tensor is None:
            return None
        for dim, numbers in self._numbers(layer, match[3], self.kept):
            tensor = KeptPart(tensor, dim, numbers)
        return tensor

    def _numbers(self, layer: str, rest: str, kept: Kept) -> Sequence[tuple[int, Sequence[int]]]:
        """Return the dimension of a tensor that holds units, with the kept numbers along it; empty if none does."""
        module, _, leaf = rest.rpartition(".")
        inputs = leaf == "weight" and module.endswith((".down", ".output"))
        if (columns := kept.columns.get(f"{layer}.feedforward")) and module in (*UP, "feedforward.down"):
            # A column is a row of up and gate [columns, hidden] and a column of down [hidden, columns], whose bias
            # [hidden] has none.
            if inputs:
                return [(1, columns)]
            return [(0, columns)] if module in UP else []
        attention, _, part = module.partition(".")
        groups = kept.groups.get(f"{layer}.{attention}")
        if not groups or attention not in ATTENTION:
            return []
        if part in ("query", "key", "value"):
            width = self.base.head_dim * (self._shared if part == "query" else 1)
            return [(0, _spread(groups, width))]
        if part in ("sinks", "gates"):
            return [(0, _spread(groups, self._shared))]
        return [(1, _spread(groups, self._shared * self.base.head_dim))] if inputs else []

    @property
    def _shared(self) -> int:
        """The heads of a group."""
        return self.base.heads // self.base.kv_heads


def _spread(numbers: Sequence[int], width: int) -> list[int]:
    """Return the indices of units that are `width` elements wide each."""
    return [at for number in numbers for at in range(number * width, (number + 1) * width)]


@dataclass(frozen=True)
class KeptPart:
    """A tensor with the elements `numbers` (ascending) of the stored one along the dimension `dim`."""

    stored: StoredTensor
    dim: int
    numbers: Sequence[int]

    @property
    def shape(self) -> torch.Size:
        """See `StoredTensor`."""
        shape = list(self.stored.shape)
        shape[self.dim] = len(self.numbers)
        return torch.Size(shape)

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`. Reads from the first to the last of the elements in question."""
        numbers = self.numbers[part[self.dim]]
        if not numbers:
            return torch.empty([each.stop - each.start for each in part])
        first = numbers[0]
        theirs = (*part[: self.dim], slice(first, numbers[-1] + 1), *part[self.dim + 1 :])
        index = torch.tensor([number - first for number in numbers])
        return self.stored[theirs].index_select(self.dim, index)


@dataclass(frozen=True)
class _Unchosen:
    """A tensor whose shape alone is known yet."""

    shape: torch.Size

    def __getitem__(self, part: Part) -> Tensor:
        raise RuntimeError("the parts of the base are not chosen yet")

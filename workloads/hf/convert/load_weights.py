"""The weights in a Hugging Face folder as the initial weights of our model: read part by part, with everything else
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.convert.write_folder import belongs, electra_pair, shared, within
from workloads.hf.files.weight_files import Weights
from workloads.hf.tables.convert import Shapes, from_hf, part_from_hf, row_of, ties, used
from workloads.hf.tables.families import family_of
from workloads.hf.tables.family import Family
from workloads.model.config import TransformerConfig
from workloads.model.stored import (
    Part,
    StoredTensor,
    StoredWeights,
    is_gates,
    misfits,
    refuse_misfits,
    refuse_strange,
    weight_notes,
    whole,
)

HINT = "remove the changes of the model or give another checkpoint"
FINAL_BIAS = "final_logits_bias"
"""A tensor that BART adds to its logits. No model here has one."""
NOT_NEEDED = re.compile(
    r"(.*\.)?(position_ids|attn\.(masked_)?bias|rotary_emb\.inv_freq|final_logits_bias)"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Tensors of older checkpoints that hold no weights, or none that transformers would use."""


def pretrained(
    config: TransformerConfig, shapes: Shapes, folder: str, tables: Collection[str] = (), added: int = 0
) -> StoredWeights:
    """Return the checkpoint in `folder` for a model of these shapes. `tables` and `added` are as in `stored.misfits`.

    Raises WorkloadError with the names of tensors that are missing, have another shape or have no counterpart in the
    model.
    """
    if not config.generator:
        return HuggingFaceWeights(config, shapes, folder, tables, added)
    parts: dict[str, StoredWeights] = {}
    for part, prefix, path in electra_pair(config, folder):
        names = {within(prefix, n): s for n, s in shapes.items() if belongs(prefix, n)}
        inner = {within(prefix, n) for n in tables if belongs(prefix, n)}
        parts[prefix] = HuggingFaceWeights(part, names, path, inner, added)
    for name in filter(shared, shapes):
        first, second = (weights.find(name) for weights in parts.values())
        full = whole(shapes[name])
        if first is None or second is None or not torch.equal(first[full], second[full]):
            raise WorkloadError(
                f"generator and discriminator in {folder} have different {name}, but here they share it; give "
                "a pair that was trained together"
            )
    return _Pair(parts)


class NamedTensors(Protocol):
    """Tensors by the names of a transformers class: see `Weights`."""

    @property
    def names(self) -> list[str]:
        """See `Weights`."""

    def __contains__(self, name: str, /) -> bool: ...

    def read(self, name: str, /) -> Tensor:
        """See `Weights`."""

    def part(self, name: str, part: Part, /) -> Tensor:
        """See `Weights`."""

    def blank(self, name: str, /) -> Tensor:
        """See `Weights`."""


@dataclass(frozen=True)
class _Pair:
    """ELECTRA's two networks, by the prefix of their tensors' names."""

    parts: Mapping[str, StoredWeights]

    @property
    def notes(self) -> Sequence[str]:
        """See `StoredWeights`."""
        return [line for part in self.parts.values() for line in part.notes]

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        prefix = "generator." if name.startswith("generator.") else "discriminator."
        return self.parts[prefix].find(within(prefix, name))


class HuggingFaceWeights:
    """See `StoredWeights`. The constructor only checks the folder; tensors are read on demand. `weights` are given if
    the tensors are stored elsewhere.
    """

    def __init__(
        self,
        config: TransformerConfig,
        shapes: Shapes,
        folder: str,
        tables: Collection[str],
        added: int,
        weights: NamedTensors | None = None,
    ) -> None:
        self._config = config
        self._shapes = shapes
        self._family = family_of(config)
        self._weights = weights or Weights(folder)
        find = self._finder(self._weights.blank)
        self._stored_shapes = {name: self._shape_of(name, find) for name in shapes}
        _check_values(self._family, config, self._finder(self._weights.read), folder)
        where = f"the checkpoint in {folder}"
        refuse_misfits(misfits(config, shapes, self._stored_shapes.__getitem__, tables, added), where, HINT)
        left_out, strange = self._left_out()
        refuse_strange(strange, where, HINT)
        self.notes = weight_notes(shapes, self._stored_shapes.__getitem__, left_out, folder)

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        shape = self._stored_shapes[name]
        return None if shape is None else _Tensor(self, name, shape)

    def read(self, name: str, part: Part) -> Tensor:
        """Return a part of an existing tensor."""
        sizes = {**self._shapes, name: self._stored_shapes[name] or self._shapes[name]}

        def read(hf_name: str, theirs: Part) -> Tensor | None:
            full = self._stored_name(hf_name)
            return None if full is None else self._weights.part(full, theirs)

        return part_from_hf(self._family, self._config, shapes=sizes, name=name, part=part, read=read)

    def _shape_of(self, name: str, find: Callable[[str], Tensor | None]) -> torch.Size | None:
        """Return the shape of our tensor `name` in the checkpoint; None if it is missing."""
        if is_gates(name):
            return None
        try:
            tensor = from_hf(self._family, self._config, self._shapes, name, find)
        except RuntimeError:  # fused tensors may not divide into ours
            return torch.Size((0,))
        return None if tensor is None else tensor.shape

    def _stored_name(self, hf_name: str) -> str | None:
        """Return the name of a tensor in the checkpoint: the full name, or without the prefix that a checkpoint of
        the bare model leaves out.
        """
        both = (hf_name, hf_name.removeprefix(self._family.prefix))
        return next((name for name in both if name in self._weights), None)

    def _finder(self, get: Callable[[str], Tensor]) -> Callable[[str], Tensor | None]:
        def find(hf_name: str) -> Tensor | None:
            name = self._stored_name(hf_name)
            return None if name is None else get(name)

        return find

    def _left_out(self) -> tuple[list[str], list[str]]:
        """Return the tensors of other heads, and those without any counterpart."""
        family = self._family
        taken = set(family.computed(self._config))
        for name in self._shapes:
            if is_gates(name):
                continue
            row, _, number = row_of(family, self._config, name)
            for hf_name in used(family, self._config, row, number):
                experts = self._shapes[name][0] if "{e}" in hf_name else 1
                taken |= {hf_name.replace("{e}", str(e)) for e in range(experts)}
        heads = [head for head in family.heads.values() if head.kind != family.head(self._config).kind]
        others = {n for head in heads for row in head.rows for n in (row.hf_name, *row.untied)}
        mine = {n for row in family.head(self._config).rows for n in (row.hf_name, *row.untied)}
        others -= mine  # a tied tensor is not among our tensors
        left: list[str] = []
        strange: list[str] = []
        for name in self._weights.names:
            full = {name, f"{family.prefix}{name}"}
            if full & (taken | mine) or NOT_NEEDED.fullmatch(name) or self._is_spare(name):
                continue
            (left if full & others or re.fullmatch(family.unused, name) else strange).append(name)
        return sorted(left), strange

    def _is_spare(self, name: str) -> bool:
        """Return whether a tensor belongs to DeepSeek's layers for predicting further tokens, which come after the
        last layer.
        """
        match = re.match(r"model\.layers\.(\d+)\.", name)
        deepseek = self._family.model_type == "deepseek_v3"
        return bool(deepseek and match and int(match.group(1)) >= self._config.layers)


@dataclass(frozen=True)
class _Tensor:
    weights: HuggingFaceWeights
    name: str
    shape: torch.Size

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        return self.weights.read(self.name, part)


def _check_values(
    family: Family, config: TransformerConfig, read: Callable[[str], Tensor | None], folder: str
) -> None:
    """Raise WorkloadError if the checkpoint has values that our model cannot hold."""
    for row in family.all_rows(config):
        if not row.untied:
            continue
        # Tied tensors must be equal. Without tying, only the tensors that transformers computes with are read.
        names = used(family, config, row) if ties(family, config) else row.untied
        copies = {name: tensor for name in names if (tensor := read(name)) is not None}
        first = next(iter(copies), "")
        for name, tensor in copies.items():
            if not torch.equal(tensor, copies[first]):
                raise WorkloadError(
                    f"the checkpoint in {folder} has different {name} and {first}, but here they are one tensor; "
                    "give a checkpoint where they are equal"
                )
    for name, wanted in family.computed(config).items():
        kept = read(name)
        if kept is not None and not _alike(kept, wanted):
            raise WorkloadError(
                f"checkpoint {folder} stores {name}, which this model derives from its configuration; give a "
                "checkpoint where both agree"
            )
    extra = read(FINAL_BIAS)
    if extra is not None and extra.any():
        raise WorkloadError(
            f"the checkpoint in {folder} has a {FINAL_BIAS} that is not zero, which is not supported here; "
            "give a checkpoint without"
        )


def _alike(kept: Tensor, wanted: Tensor) -> bool:
    """Return whether a table with values from -1 to 1 equals the wanted one, up to rounding to its type."""
    apart = torch.finfo(kept.dtype).eps * 16 if kept.dtype == torch.float32 else torch.finfo(kept.dtype).eps
    return kept.shape == wanted.shape and float((kept.float() - wanted).abs().max()) <= apart

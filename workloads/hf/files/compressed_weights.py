"""Read weights in the form of compressed-tensors: integers of 4 or 8 bits, with a scale for a group or a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.files.mxfp4 import Source
from workloads.model.stored import Part

METHOD = "compressed-tensors"
"""transformers' name for the form."""
FORMS = ("pack-quantized", "int-quantized")
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
"""Suffixes of the tensors that store a weight: int32 [out, in x bits / 32], a scale [out, groups], and its shape. In
8 bits the weight itself may be int8.
"""


def check_form(described: Mapping[str, Any], folder: str) -> None:
    """Raise WorkloadError for a `quantization_config` whose weights are not read here."""
    groups = (described.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    known = described.get("format") in FORMS and all(
        each.get("type", "int") == "int" and each.get("num_bits") in (4, 8) and each.get("symmetric", True)
        for each in weights
    )
    more = described.get("kv_cache_scheme") or any(group.get("output_activations") for group in groups)
    if not known or more:
        raise WorkloadError(
            f"{folder} is quantised as {described.get('format')}; only symmetric integers of 4 or 8 bits can be read: "
            "give a folder with the full weights"
        )


def rounds_activations(described: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` rounds the inputs of layers."""
    return any(group.get("input_activations") for group in (described.get("config_groups") or {}).values())


class Expanded:
    """The tensors of a source, with quantised weights expanded to the dtype of their scales."""

    def __init__(self, source: Source) -> None:
        self._source = source
        known = frozenset(source.names)
        self._packed = frozenset(
            name.removesuffix(PACKED) for name in known if name.endswith(f".weight{PACKED}")
        )
        with_scale = {name for name in known if name.endswith(".weight") and name + SCALE in known}
        self._quantised = self._packed | with_scale
        stored = {base + end for base in self._quantised for end in (PACKED, SCALE, SHAPE)}
        self.names = [*(name for name in source.names if name not in stored), *sorted(self._packed)]

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor."""
        shapes = dict(self._source.shapes)
        for base in self._packed:
            shapes[base] = [int(size) for size in self._source.part(base + SHAPE, (slice(0, 2),))]
        return shapes

    def part(self, name: str, part: Part) -> Tensor:
        """Return a part of one tensor. Whole rows of a quantised weight are read."""
        if name not in self._quantised:
            return self._source.part(name, part)
        rows, columns = part
        width = self.shapes[name][1]
        every = lambda leaf: self._source.part(leaf, (rows, slice(0, self._source.shapes[leaf][1])))  # noqa: E731
        integers = unpacked(every(name + PACKED), width) if name in self._packed else every(name)
        scale = every(name + SCALE)
        groups = integers.to(scale.dtype).unflatten(1, (scale.shape[1], -1))
        return (groups * scale.unsqueeze(-1)).flatten(1)[:, columns]


def unpacked(words: Tensor, width: int) -> Tensor:
    """Return the integers int32 [rows, width] of words int32 [rows, ..], each of 8 or 4 of them, the first in the low
    bits, shifted to be positive.
    """
    bits = 32 * words.shape[1] // width
    if bits not in (4, 8) or words.shape[1] != -(-width * bits // 32):
        raise WorkloadError(
            f"a quantised row of {width} weights has {words.shape[1]} words; this format is not known here"
        )
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :width] - (1 << (bits - 1))

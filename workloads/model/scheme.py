"""How linear layers are quantised: the number format, the group that shares a scale, and which layers. Standard library
only, because the job file and the planner read it too.

int8 and int4 are those of compressed-tensors, symmetric. q8_0 and q4_0 are those of GGUF
(github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

Format = Literal["int8", "int4", "q8_0", "q4_0"]
BITS: dict[Format, int] = {"int8": 8, "int4": 4, "q8_0": 8, "q4_0": 4}
BLOCK = 32
"""Weights that share a scale in the formats of GGUF."""
OF_GGUF: tuple[Format, ...] = ("q8_0", "q4_0")


@dataclass(frozen=True)
class Scheme:
    """The quantisation of linear layers.

    Attributes:
        weights: the format of a weight [out, in].
        group: consecutive inputs that share a scale; 0 for all of a row.
        activations: whether the input of a layer is rounded to int8, with a scale for each token.
        match: patterns (fnmatch) of the parameters that are quantised, among the weights of linear layers of blocks.
        keep: patterns of those that stay in full precision.
        int8: patterns of the quantised ones that have the format int8, where the others have `weights`.
    """

    weights: Format
    group: int = 128
    activations: bool = False
    match: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    int8: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Return the bits of a weight, without its share of the scale, unless a pattern of `int8` matches it."""
        return BITS[self.weights]

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight [rows, columns] as it is stored.

        GGUF stores blocks of 32 numbers with a scale in fp16. compressed-tensors stores the numbers of each row in
        words of 32 bits, a scale in fp32 for each group, and the shape as two int64.

        Args:
            rows: outputs of the layer.
            columns: inputs of the layer.
        """
        if self.is_of_gguf:
            return rows * columns // BLOCK * (BLOCK * self.bits // 8 + 2)
        words = -(-columns * self.bits // 32)
        return 4 * rows * (words + columns // (self.group or columns)) + 2 * 8

    def of(self, name: str) -> Scheme:
        """Return how the weight of this name is rounded: a scheme with one format."""
        if not self.int8:
            return self
        return replace(self, weights="int8" if _matches(name, self.int8) else self.weights, int8=())

    @property
    def is_of_gguf(self) -> bool:
        """Return whether the format is one of GGUF."""
        return self.weights in OF_GGUF

    def chosen(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names among those of the weights of linear layers that are quantised."""
        return frozenset(
            name for name in names if _matches(name, self.match) and not _matches(name, self.keep)
        )

    def fits(self, columns: int) -> bool:
        """Return whether rows of `columns` inputs divide into whole groups."""
        return not self.group or columns % self.group == 0

    def unmatched(self, names: Collection[str]) -> str:
        """Return the first pattern that matches none of the names; empty if each matches one."""
        of_names = ((names, (*self.match, *self.keep)), (self.chosen(names), self.int8))
        return next(
            (
                each
                for known, patterns in of_names
                for each in patterns
                if not any(fnmatchcase(name, each) for name in known)
            ),
            "",
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

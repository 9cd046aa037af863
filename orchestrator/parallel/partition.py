"""The part of every tensor that a rank holds, derived from the sharding styles that the workload declares.

It is a pure function of names and shapes. Initial weights, commits and gradients all use it, so they agree.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from orchestrator.parallel.mesh import Mesh
from workloads.adapters.lora import EXPERTS_A, EXPERTS_B

FIRST = ("column", "vocab", "joined", "stack", "own")
"""Styles of modules whose tensors are all cut over their first dimension."""


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank holds before data-parallel sharding: `extent` at `start` of `shape`.

    Attributes:
        shape: shape of the whole tensor.
        start: first index of the part in each dimension.
        extent: size of the part in each dimension.
        over_tp: whether tensor-parallel ranks hold different parts.
        partial: whether all tensor-parallel ranks hold the same part, and its gradient is the sum of theirs.
        expert: whether the expert group divides the tensor.
        stack: whether the tensor is a stack of experts, each a matrix or vector of its own.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    over_tp: bool = False
    partial: bool = False
    expert: bool = False
    stack: bool = False

    @property
    def matrix(self) -> bool:
        """Whether the tensor is a matrix or a stack of matrices, as opposed to norms and biases."""
        return len(self.shape) > 1 + self.stack

    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the whole tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.start, self.extent, strict=True))


def span(size: int, index: int, ways: int) -> tuple[int, int]:
    """Return (start, length) of part `index` of `size` elements in `ways` parts that differ by at most one.

    Args:
        size: number of elements.
        index: number of the part.
        ways: number of parts.
    """
    # Sizes need not divide: the rounding spreads the remainder, and every rank can compute every other rank's part.
    start = size * index // ways
    return start, size * (index + 1) // ways - start


def style_of(styles: Mapping[str, str], module: str) -> str | None:
    """Return the sharding style of a module: that of the first pattern of `styles` that matches.

    None: the module is replicated.

    Args:
        styles: sharding styles by pattern; the order matters.
        module: name of the module.
    """
    return next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), None)


def is_sliced(module: str) -> bool:
    """Whether a module sees slices of the sequence under sequence parallelism.

    Shared experts do not, because the router next to them needs the whole sequence.
    """
    return ".shared." not in f"{module}."


def cut_of(
    name: str, shape: Sequence[int], styles: Mapping[str, str], mesh: Mesh, stacks: Container[str] = ()
) -> Cut:
    """Return this rank's part of a tensor.

    Args:
        name: canonical name of the tensor.
        shape: its global shape.
        styles: sharding styles by pattern of module names.
        mesh: the process groups.
        stacks: names of stacks of experts, see `Workload.stacks`.
    """
    module, _, leaf = name.rpartition(".")
    style = style_of(styles, module)
    start = [0] * len(shape)
    extent = list(shape)
    whole_in_parts = style == "heads"

    def take(dim: int, index: int, ways: int) -> None:
        start[dim], extent[dim] = span(shape[dim], index, ways)

    tp = mesh.tp
    over = False
    if style == "expert":
        take(0, mesh.expert.index, mesh.expert.size)
        # Experts are [experts, out, in]. Tensor parallelism cuts their inner dimension: out of gate and up, in of down.
        # Of an adapter's pair the matrix with that dimension is cut too. The bias of down is added after the sum over
        # ranks, so it is not cut.
        dim, narrow = (2, EXPERTS_B) if leaf.startswith("down") else (1, EXPERTS_A)
        if tp.size > 1 and not leaf.endswith(narrow) and dim < len(shape):
            take(dim, tp.index, tp.size)
            over = True
        # That matrix of the pair is whole on every rank, but each rank's products see only its part of the inner
        # dimension.
        whole_in_parts = leaf.endswith(narrow)
    elif tp.size > 1 and (style in FIRST or (style == "row" and leaf == "weight")):
        take(1 if style == "row" else 0, tp.index, tp.size)
        over = True
    # Norms and row biases act on this rank's slice of the sequence, so their gradients are partial sums over tokens.
    in_slices = mesh.layout.sequence and style in ("sequence", "row") and not over and is_sliced(module)
    partial = tp.size > 1 and (whole_in_parts or in_slices)
    return Cut(
        shape=tuple(shape),
        start=tuple(start),
        extent=tuple(extent),
        over_tp=over,
        partial=partial,
        expert=style == "expert",
        stack=name in stacks,
    )

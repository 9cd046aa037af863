"""Which part of every tensor a rank holds, from the styles that the workload declares.

A pure function of names and shapes: initial weights, commits and gradients all ask it, so that they agree.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from orchestrator.parallel.mesh import Mesh
from workloads.adapters.lora import EXPERTS_A, EXPERTS_B

FIRST = ("column", "vocab", "joined", "stack", "own")
"""Styles of modules all of whose tensors are cut over their first dimension."""


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank holds before data-parallel sharding: `extent` at `start` of `shape`.

    over_tp: other tensor-parallel ranks hold other parts. partial: all of them hold the same part, and the
    gradient is the sum of theirs. expert: the part is shared out over the expert group. stack: it is of a stack of
    experts, each of them a matrix or a vector of its own.
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
        """Whether the tensor is one or a stack of them: no vector such as a norm or a bias, nor experts' biases."""
        return len(self.shape) > 1 + self.stack

    def slices(self) -> tuple[slice, ...]:
        """The part as an index into the whole tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.start, self.extent, strict=True))


def span(size: int, index: int, ways: int) -> tuple[int, int]:
    """(start, length) of part `index` when `size` is cut into `ways` parts that differ by at most one."""
    start = size * index // ways
    return start, size * (index + 1) // ways - start


def style_of(styles: Mapping[str, str], module: str) -> str | None:
    """The style that the workload declares for a module."""
    return next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), None)


def is_sliced(module: str) -> bool:
    """Whether a module stands on slices of the sequence under sequence parallelism.

    Shared experts do not: the router beside them judges the whole sequence.
    """
    return ".shared." not in f"{module}."


def cut_of(
    name: str, shape: Sequence[int], styles: Mapping[str, str], mesh: Mesh, stacks: Container[str] = ()
) -> Cut:
    """The part of the tensor `name` of that global shape which this rank holds; `stacks` are those of
    `Workload.stacks`."""
    module, _, leaf = name.rpartition(".")
    style = style_of(styles, module)
    start, extent = [0] * len(shape), list(shape)
    whole_in_parts = style == "heads"

    def take(dim: int, index: int, ways: int) -> None:
        start[dim], extent[dim] = span(shape[dim], index, ways)

    tp, over = mesh.tp, False
    if style == "expert":
        take(0, mesh.expert.index, mesh.expert.size)
        # Inside an expert the inner dimension is cut: out of gate and up, in of down. So is, of the pair of an adapter
        # beside such a weight, the one that has this dimension. The bias of down is added to the sum of all ranks.
        dim, narrow = (2, EXPERTS_B) if leaf.startswith("down") else (1, EXPERTS_A)
        if tp.size > 1 and not leaf.endswith(narrow) and dim < len(shape):
            take(dim, tp.index, tp.size)
            over = True
        whole_in_parts = leaf.endswith(narrow)
    elif tp.size > 1 and (style in FIRST or (style == "row" and leaf == "weight")):
        take(1 if style == "row" else 0, tp.index, tp.size)
        over = True
    in_slices = mesh.layout.sequence and style in ("sequence", "row") and not over and is_sliced(module)
    partial = tp.size > 1 and (whole_in_parts or in_slices)
    return Cut(tuple(shape), tuple(start), tuple(extent), over, partial, style == "expert", name in stacks)

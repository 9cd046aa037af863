"""The weights that initialise a model: the ones that fit it, and tables with rows for added tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

Part = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop for each dimension."""
HEADS = ("head.", "sentence_head.")
"""Prefixes of tensors that a checkpoint may lack, because it was trained with another head or without one."""
GATES = ".gates.log_alpha"
"""The end of the names of gates of attention heads."""
OUTPUT = ("head.output.weight", "head.output.bias")
"""The tensors of a classification head with one row for each label."""
SHOWN = 4
"""The maximum number of tensors that a message names."""


class StoredTensor(Protocol):
    """A tensor in a file. Indexing reads only the requested part."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the full tensor."""

    def __getitem__(self, part: Part, /) -> Tensor:
        """Return a part, on CPU, in its own dtype."""


class StoredWeights(Protocol):
    """The weights of a checkpoint, by the names of a model's tensors."""

    @property
    def notes(self) -> Sequence[str]:
        """Return notes, one line each, on tensors that are newly initialised and on unused
        tensors of the checkpoint.
        """

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor `name` of the model; None if it is newly initialised."""


class NoWeights:
    """No weights: every tensor starts from random values, see `StoredWeights`."""

    notes: tuple[str, ...] = ()

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        return None


NONE = NoWeights()


@dataclass(frozen=True)
class ExtendedTable:
    """A table with more rows than are stored. `new_rows(numbers)` returns the additional ones, [rows, ..]."""

    stored: StoredTensor
    shape: torch.Size
    new_rows: Callable[[range], Tensor]

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        rows = part[0]
        rest = part[1:]
        have = self.stored.shape[0]
        pieces = []
        if rows.start < have:
            pieces.append(self.stored[(slice(rows.start, min(rows.stop, have)), *rest)].float())
        if rows.stop > have:
            pieces.append(self.new_rows(range(max(rows.start, have), rows.stop))[(slice(None), *rest)])
        return torch.cat(pieces)


@dataclass(frozen=True)
class ReorderedHead:
    """Weights whose classification head takes its rows in the order `rows`. `extra_notes` follow its notes."""

    stored: StoredWeights
    rows: tuple[int, ...]
    extra_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> Sequence[str]:
        """See `StoredWeights`."""
        return (*self.stored.notes, *self.extra_notes)

    def find(self, name: str) -> StoredTensor | None:
        """See `StoredWeights`."""
        tensor = self.stored.find(name)
        reordered = tensor is not None and name in OUTPUT and self.rows != tuple(range(len(self.rows)))
        return ReorderedRows(tensor, self.rows) if tensor is not None and reordered else tensor


@dataclass(frozen=True)
class ReorderedRows:
    """A tensor whose row n is row `rows[n]` of the stored one."""

    stored: StoredTensor
    rows: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """See `StoredTensor`."""
        return self.stored.shape

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        values = self.stored[(slice(0, self.shape[0]), *part[1:])]
        return values[list(self.rows[part[0]])]


def whole(shape: Sequence[int]) -> Part:
    """Return the part that covers a whole tensor of that shape."""
    return tuple(slice(0, size) for size in shape)


def may_begin_anew(config: TransformerConfig, name: str) -> bool:
    """Return whether a checkpoint may lack a tensor, because it belongs to a head that the checkpoint was not trained
    with, or is the gates of attention heads. The language model's own head must be present.

    Args:
        config: the model.
        name: name of the tensor.
    """
    return is_gates(name) or (config.head != "language" and name.startswith(HEADS))


def is_gates(name: str) -> bool:
    """Return whether a tensor is the gates of an attention's heads, see `workloads.model.head_gates`."""
    return name.endswith(GATES)


@dataclass(frozen=True)
class Misfit:
    """A tensor of a model that a checkpoint lacks, or has in the shape `stored_shape`."""

    name: str
    shape: torch.Size
    stored_shape: torch.Size | None = None

    def __str__(self) -> str:
        if self.stored_shape is None:
            return f"{self.name} {list(self.shape)} is missing"
        return f"{self.name} is {list(self.stored_shape)} where the model has {list(self.shape)}"


class DoesNotFit(WorkloadError):
    """The tensors of a checkpoint are not those of the model; `misfits` are those that differ."""

    def __init__(self, message: str, problems: Sequence[Misfit]) -> None:
        super().__init__(message)
        self.misfits = tuple(problems)


def misfits(
    config: TransformerConfig,
    shapes: Mapping[str, torch.Size],
    stored: Callable[[str], torch.Size | None],
    tables: Collection[str],
    added: int,
) -> list[Misfit]:
    """Return the tensors that the checkpoint lacks or has in another shape.

    `tables` are the tensors with one row per token. They may have fewer rows in the checkpoint if all tokens from
    number `added` on were added to the tokenizer, and the checkpoint has rows for at least all the others.

    Args:
        config: the model.
        shapes: its tensors.
        stored: returns the shape of a tensor in the checkpoint; None if it is not there.
        tables: names of the tensors with one row per token.
        added: number of the first added token.
    """
    problems = []
    for name, shape in shapes.items():
        stored_shape = stored(name)
        if stored_shape is None:
            if not may_begin_anew(config, name):
                problems.append(Misfit(name, shape))
        elif stored_shape != shape and not (
            name in tables and added <= stored_shape[0] < shape[0] and stored_shape[1:] == shape[1:]
        ):
            problems.append(Misfit(name, shape, stored_shape))
    return problems


def refuse_misfits(problems: Sequence[Misfit], where: str, hint: str) -> None:
    """Raise DoesNotFit if `misfits` found any problems with the checkpoint at `where`.

    Args:
        problems: what `misfits` returned.
        where: the checkpoint, for the message.
        hint: what to do.
    """
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listing = "; ".join(map(str, problems[:SHOWN]))
        raise DoesNotFit(f"{where} does not fit: {listing}{more}; {hint}", problems)


def refuse_strange(names: Sequence[str], where: str, hint: str) -> None:
    """Raise WorkloadError if the checkpoint at `where` has tensors, by these names, that the model lacks.

    Args:
        names: the tensors that the model lacks.
        where: the checkpoint, for the message.
        hint: what to do.
    """
    if names:
        raise WorkloadError(f"{where} has {listed(sorted(names))}, which this model lacks; {hint}")


def weight_notes(
    shapes: Mapping[str, torch.Size],
    stored: Callable[[str], torch.Size | None],
    left_out: Sequence[str],
    where: str,
) -> tuple[str, ...]:
    """Return the notes on a checkpoint at `where`, whose tensors `left_out` are not used.

    Args:
        shapes: the model's tensors.
        stored: returns the shape of a tensor in the checkpoint; None if it is not there.
        left_out: names of tensors that are not used.
        where: the checkpoint, for the message.
    """
    fresh = [name for name in shapes if stored(name) is None and not is_gates(name)]
    tables = {
        name: stored_shape[0]
        for name in shapes
        if (stored_shape := stored(name)) and stored_shape[0] < shapes[name][0]
    }
    lines = []
    if fresh:
        lines.append(f"{listed(fresh)} start from random values: {where} has none")
    if tables:
        name, rows = next(iter(tables.items()))
        lines.append(f"tokens {rows} to {shapes[name][0] - 1} start from random values: {where} has {rows}")
    if left_out:
        lines.append(f"{listed(left_out)} of {where} are left out: they are of another head")
    return tuple(lines)


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

"""One function for each direction, for every table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.family import Family, Row
from workloads.model.config import TransformerConfig

Shapes = Mapping[str, torch.Size]


def row_of(family: Family, config: TransformerConfig, name: str) -> tuple[Row, int, str]:
    """The row of our tensor `name`, its place among the row's tensors, and its layer's number."""
    for row in family.all_rows(config):
        if found := row.number(name):
            return row, *found
    raise WorkloadError(
        f"{family.model_type} of transformers has nothing for {name}; change the model's options"
    )


def ours(
    family: Family, config: TransformerConfig, shapes: Shapes, name: str, read: Callable[[str], Tensor | None]
) -> Tensor | None:
    """Our tensor `name` from theirs, None where `read` has none. Devices and dtypes are as read."""
    row, place, number = row_of(family, config, name)
    theirs = row.theirs.replace("{n}", number)
    if "{e}" in theirs:
        parts = [read(theirs.replace("{e}", str(e))) for e in range(shapes[name][0])]
        found = [part for part in parts if part is not None]
        return torch.stack(found) if len(found) == len(parts) else None
    tensor = next((t for name in used(family, config, row, number) if (t := read(name)) is not None), None)
    if tensor is None:
        return None
    tensor = tensor.t() if row.transposed else tensor
    if row.order:
        tensor = tensor[torch.tensor(row.order(config), device=tensor.device)]
    if len(row.ours) == 1:
        return tensor
    sizes = [shapes[n.replace("{n}", number)][0] for n in row.ours]
    return tensor.split(sizes)[place]


def used(family: Family, config: TransformerConfig, row: Row, number: str = "") -> list[str]:
    """The names under which a checkpoint may have the row's tensor, what transformers computes with first."""
    names = [row.theirs, *row.untied] if ties(family, config) else [*row.untied, row.theirs]
    return [name.replace("{n}", number) for name in names]


def ties(family: Family, config: TransformerConfig) -> bool:
    """Whether a model of transformers for `config` shares the tensors that may be shared."""
    return config.tied or "tied" in family.unsaid


def theirs(
    family: Family, config: TransformerConfig, shapes: Shapes, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every one of their tensors by name, from ours."""
    for name in shapes:
        row, place, number = row_of(family, config, name)
        if place:
            continue
        target = row.theirs.replace("{n}", number)
        tensor = torch.cat([read(n.replace("{n}", number)) for n in row.ours])
        if row.order:
            tensor = tensor[torch.tensor(row.order(config)).argsort()]
        if "{e}" in target:
            yield from ((target.replace("{e}", str(e)), part) for e, part in enumerate(tensor))
        else:
            yield target, tensor.t() if row.transposed else tensor
            if not ties(family, config):
                yield from ((name, tensor.clone()) for name in row.untied)

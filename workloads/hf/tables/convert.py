"""Convert tensors between our model and a Hugging Face class, in both directions, by a family's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.tables.family import Family, Row
from workloads.model.config import TransformerConfig
from workloads.model.stored import Part

Shapes = Mapping[str, torch.Size]


def row_of(family: Family, config: TransformerConfig, name: str) -> tuple[Row, int, str]:
    """Return the row of our tensor `name`, its index among the row's tensors, and its layer's number. Raises
    WorkloadError.
    """
    for row in family.all_rows(config):
        if match := row.number(name):
            return row, *match
    raise WorkloadError(
        f"{family.model_type} of transformers has nothing for {name}; change the model's options"
    )


def from_hf(
    family: Family, config: TransformerConfig, shapes: Shapes, name: str, read: Callable[[str], Tensor | None]
) -> Tensor | None:
    """Return our tensor `name`, made from those of the Hugging Face class. `read(hf_name)` returns a tensor, or None
    if it is missing.

    None if a tensor is missing. Devices and dtypes are as read; shapes are those of our tensors.
    """
    row, index, number = row_of(family, config, name)
    hf_name = row.hf_name.replace("{n}", number)
    if "{e}" in hf_name:
        parts = [read(hf_name.replace("{e}", str(e))) for e in range(shapes[name][0])]
        present = [part for part in parts if part is not None]
        return torch.stack(present) if len(present) == len(parts) else None
    tensor = next((t for name in used(family, config, row, number) if (t := read(name)) is not None), None)
    if tensor is None:
        return None
    tensor = _folded(row, shapes[name], tensor)
    tensor = _swapped(tensor) if row.transposed else tensor
    if row.is_interleaved:
        return tensor[:, index :: len(row.names)]
    if row.order:
        tensor = tensor[torch.tensor(row.order(config), device=tensor.device)]
    if len(row.names) == 1:
        return tensor
    sizes = [shapes[n.replace("{n}", number)][0] for n in row.names]
    return tensor.split(sizes)[index]


def part_from_hf(
    family: Family,
    config: TransformerConfig,
    shapes: Shapes,
    name: str,
    part: Part,
    read: Callable[[str, Part], Tensor | None],
) -> Tensor:
    """Return a part of our tensor `name`, which the checkpoint has. `read(hf_name, part)` is as in `from_hf`."""
    row, index, number = row_of(family, config, name)
    rows, *rest = part
    if "{e}" in row.hf_name:
        names = [
            row.hf_name.replace("{n}", number).replace("{e}", str(e)) for e in range(rows.start, rows.stop)
        ]
        return torch.stack([_of(read(hf_name, tuple(rest)), hf_name) for hf_name in names])
    if row.theirs:
        full_part = tuple(slice(0, size) for size in row.theirs(config))
        tensor = _folded(row, shapes[name], _of(read(row.hf_name.replace("{n}", number), full_part), name))
        return (_swapped(tensor) if row.transposed else tensor)[part]
    if row.is_interleaved:
        ways = len(row.names)
        theirs = (rows, slice(rest[0].start * ways, rest[0].stop * ways), *rest[1:])
        hf_name = row.hf_name.replace("{n}", number)
        tensor = _of(read(hf_name, _swapped_part(theirs) if row.transposed else theirs), name)
        return (_swapped(tensor) if row.transposed else tensor)[:, index::ways]
    before = sum(shapes[n.replace("{n}", number)][0] for n in row.names[:index])
    wanted = range(before + rows.start, before + rows.stop)
    order: list[int] | None = None
    if row.order:
        chosen = [row.order(config)[i] for i in wanted]
        wanted = range(min(chosen, default=0), max(chosen, default=-1) + 1)
        order = [i - wanted.start for i in chosen]
    theirs = (slice(wanted.start, wanted.stop), *rest)
    theirs = _swapped_part(theirs) if row.transposed else theirs
    names = used(family, config, row, number)
    values = _of(next((t for n in names if (t := read(n, theirs)) is not None), None), name)
    values = _swapped(values) if row.transposed else values
    return values if order is None else values[torch.tensor(order, dtype=torch.int64)]


def _folded(row: Row, shape: torch.Size, tensor: Tensor) -> Tensor:
    """Return their tensor with as many dimensions as ours; unchanged if its size differs."""
    wanted = shape[::-1] if row.transposed else shape
    return tensor.reshape(wanted) if row.theirs and tensor.numel() == wanted.numel() else tensor


def _swapped(tensor: Tensor) -> Tensor:
    """Return the tensor with the last two dimensions exchanged; a vector unchanged."""
    return tensor.transpose(-2, -1) if tensor.dim() > 1 else tensor


def _swapped_part(part: Part) -> Part:
    return (*part[:-2], *part[:-3:-1])


def _interleaved(tensors: list[Tensor]) -> Tensor:
    """Return one tensor [experts, out, ..] in which these alternate along `out`."""
    experts, out, *rest = tensors[0].shape
    joined = tensors[0].new_empty((experts, out * len(tensors), *rest))
    for index, tensor in enumerate(tensors):
        joined[:, index :: len(tensors)].copy_(tensor)
    return joined


def _joined(tensors: list[Tensor]) -> Tensor:
    """Like `torch.cat`, which for tensors without data would import torch's compiler, taking five seconds of a
    command.
    """
    rows = [tensor.shape[0] for tensor in tensors]
    joined = tensors[0].new_empty((sum(rows), *tensors[0].shape[1:]))
    for part, tensor in zip(joined.split(rows), tensors, strict=True):
        part.copy_(tensor)
    return joined


def _of(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise WorkloadError(f"the checkpoint has lost {name} since it was looked at; give it again")
    return tensor


def used(family: Family, config: TransformerConfig, row: Row, number: str = "") -> list[str]:
    """Return the names under which a checkpoint may have the row's tensor, transformers' own first."""
    names = [row.hf_name, *row.untied] if ties(family, config) else [*row.untied, row.hf_name]
    return [name.replace("{n}", number) for name in names]


def ties(family: Family, config: TransformerConfig) -> bool:
    """Return whether transformers ties the word embeddings of a model for `config`."""
    return config.tied or "tied" in family.unsaid


def to_hf(
    family: Family, config: TransformerConfig, shapes: Shapes, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the Hugging Face class by name, from our tensors, which `read(name)` returns."""
    # The class without a head has no module around the body, so its names lack the body's.
    outside = family.prefix if config.head == "none" else ""
    for name, tensor in _with_names_of_heads(family, config, shapes, read):
        yield name.removeprefix(outside), tensor


def _with_names_of_heads(
    family: Family, config: TransformerConfig, shapes: Shapes, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by the names that they have in classes with a head."""
    for name in shapes:
        row, index, number = row_of(family, config, name)
        if index:
            continue
        target = row.hf_name.replace("{n}", number)
        tensor = (_interleaved if row.is_interleaved else _joined)(
            [read(n.replace("{n}", number)) for n in row.names]
        )
        if row.order:
            tensor = tensor[torch.tensor(row.order(config)).argsort()]
        if "{e}" in target:
            yield from ((target.replace("{e}", str(e)), part) for e, part in enumerate(tensor))
        else:
            tensor = _swapped(tensor) if row.transposed else tensor
            yield target, tensor.reshape(row.theirs(config)) if row.theirs else tensor
            if not ties(family, config):
                yield from ((name, tensor.clone()) for name in row.untied)
    yield from ((name, tensor.clone()) for name, tensor in family.computed(config).items())

"""State by canonical name and global offset: the pieces that a rank saves, and how it loads a commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.models.averaged import AVERAGE
from orchestrator.optim.blocks import new_slot, saved_views, slot_views, stored_shape
from orchestrator.optim.kinds import Slot
from orchestrator.parallel.parameter_shard import Box, ParameterShard
from workloads.model.initialise import ROWS
from workloads.model.inside import is_map
from workloads.model.stored import Part, StoredTensor
from workloads.workload import Workload

READ_BYTES = 2**22
"""Approximate bytes of a stored tensor that are read at once."""


def pieces(
    shards: Iterable[ParameterShard],
    optimizer: torch.optim.Optimizer,
    slots: Callable[[str], Sequence[Slot]],
    averages: Mapping[Tensor, Tensor],
) -> Iterator[TensorPiece]:
    """Yield the weights, optimizer states and averaged weights that this rank saves.

    Over all ranks the pieces tile every tensor exactly once.

    Args:
        shards: the shards that this rank saves, see `shards_to_save`.
        optimizer: holds their states.
        slots: returns the state tensors of a parameter.
        averages: averaged weights by parameter.
    """
    for shard in shards:
        tensors: dict[str, Tensor] = {committed_name(shard.name): shard.parameter.detach()}
        if shard.parameter in averages:
            tensors[f"{AVERAGE}{shard.name}"] = averages[shard.parameter]
        for name, tensor in tensors.items():
            for box, view in shard.views(tensor):
                yield TensorPiece(name, shard.cut.shape, box.start, view)
        state = optimizer.state.get(shard.parameter, {})
        for slot in slots(shard.name):
            existing = state.get(slot.name)  # no state exists before the first step
            tensor = new_slot(slot, shard) if existing is None else existing
            for box, view in saved_views(slot, shard, tensor):
                yield TensorPiece(
                    committed_slot(shard.name, slot), stored_shape(slot, shard), box.start, view
                )


def committed_shapes(workload: Workload, thawing: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors in a commit.

    Frozen parameters are not stored, nor are those that are `thawing`, which train from this commit on.

    Args:
        workload: the model.
        thawing: parameters that begin to train at this commit's step.
    """
    left_out = {*workload.frozen, *thawing}
    committed = {name: shape for name, shape in workload.shapes.items() if name not in left_out}
    return {committed_name(name): tuple(shape) for name, shape in committed.items()}


def committed_name(name: str) -> str:
    """Return the name of a parameter in a commit. Learned maps of a distilled student are no part of its model."""
    return name if is_map(name) else f"model.{name}"


def committed_slot(name: str, slot: Slot) -> str:
    """Return the name of a parameter's optimizer state in a commit.

    Args:
        name: name of the parameter.
        slot: the state.
    """
    return f"optim.{name}.{slot.name}"


def initialise(workload: Workload, name: str, seed: int, views: Iterable[tuple[Box, Tensor]]) -> None:
    """Fill this rank's parts of a tensor with initial values.

    Of stored weights, only these parts are read; other weights are drawn in full.

    Args:
        workload: draws or reads the values.
        name: name of the parameter.
        seed: of values that are drawn.
        views: the boxes of this rank in the full tensor, each with the memory to fill.
    """
    stored = workload.stored(name, seed)
    full = workload.initial(name, seed) if stored is None else None
    for box, view in views:
        if full is not None:
            view.copy_(box.of(full))
        elif stored is not None:
            _read_into(view, stored, box.slices())


def _read_into(view: Tensor, stored: StoredTensor, part: Part) -> None:
    """Read a part of a stored tensor a few rows at a time, so that little of it is in memory twice."""
    if not part:
        view.copy_(stored[part])
        return
    rows, *rest = part
    # Rows per read: READ_BYTES over the bytes of an fp32 row.
    step = max(1, READ_BYTES // (4 * max(1, view.numel() // len(view)))) if len(view) else 1
    if view.dim() == 2:  # whole tiles, so that none is drawn twice
        step = max(1, step // ROWS) * ROWS
    begin = rows.start
    while begin < rows.stop:
        stop = min(begin - begin % step + step, rows.stop)
        view[begin - rows.start : stop - rows.start].copy_(stored[(slice(begin, stop), *rest)])
        begin = stop


def shards_to_save(shards: Iterable[ParameterShard]) -> list[ParameterShard]:
    """Return the shards that this rank saves. A replica group divides its shards, so that all ranks write about as
    much.

    Greedy: the largest shard goes to the rank with the least to write. Every rank computes the same assignment.
    """
    load: dict[tuple[int, ...], list[int]] = {}
    saved = []
    for shard in sorted(shards, key=lambda s: (-s.parameter.numel(), s.name)):
        if not shard.saved:
            continue
        written = load.setdefault(shard.replica_group.ranks, [0] * shard.replica_group.size)
        writer = written.index(min(written))
        written[writer] += shard.parameter.numel()
        if writer == shard.replica_group.index:
            saved.append(shard)
    return saved


@torch.no_grad()
def restore(
    shards: Iterable[ParameterShard],
    optimizer: torch.optim.Optimizer,
    slots: Callable[[str], Sequence[Slot]],
    averages: Mapping[Tensor, Tensor],
    reader: Reader,
    thawed: Mapping[str, int],
) -> None:
    """Load this rank's part of weights, optimizer states and averaged weights.

    Args:
        shards, optimizer, slots, averages: as in `pieces`.
        reader: the commit.
        thawed: the step after which a parameter is trained, if that is not the first. A parameter trained from this
            very commit on already has its weights, which are also their average.
    """
    steps = int(reader.read("optim.step"))
    for shard in shards:
        # Adam's bias correction counts a parameter's own updates, and a thawed one has none from before.
        age = float(steps - thawed.get(shard.name, 0))
        if shard.name in thawed and committed_name(shard.name) not in reader.manifest.tensors:
            begin_state(shard, optimizer, slots, age)
            if shard.parameter in averages:
                averages[shard.parameter].copy_(shard.parameter)
            continue
        tensors = {committed_name(shard.name): shard.parameter.detach()}
        if shard.parameter in averages:
            tensors[f"{AVERAGE}{shard.name}"] = averages[shard.parameter]
        for name, tensor in tensors.items():
            for box, view in shard.views(tensor):
                view.copy_(reader.read(name, box.start, box.extent))
        state: dict[str, Tensor] = {}
        for slot in slots(shard.name):
            state[slot.name] = new_slot(slot, shard)
            for box, view in slot_views(slot, shard, state[slot.name]):
                view.copy_(reader.read(committed_slot(shard.name, slot), box.start, box.extent))
        state["step"] = step_count(age, shard, optimizer)
        optimizer.state[shard.parameter] = state


def begin_state(
    shard: ParameterShard,
    optimizer: torch.optim.Optimizer,
    slots: Callable[[str], Sequence[Slot]],
    age: float = 0.0,
) -> None:
    """Give a parameter the optimizer state that it has before its first update: all zeros.

    Args:
        shard: the parameter.
        optimizer: its optimizer.
        slots: as in `pieces`.
        age: updates of the parameter so far.
    """
    state = {slot.name: new_slot(slot, shard) for slot in slots(shard.name)}
    optimizer.state[shard.parameter] = {**state, "step": step_count(age, shard, optimizer)}


def step_count(age: float, shard: ParameterShard, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a parameter's step count, on its device for fused kernels. Other optimizers read it, and would wait for
    the device.

    Args:
        age: updates of the parameter so far.
        shard: the parameter.
        optimizer: its optimizer.
    """
    on_host = getattr(optimizer, "step_count_on_host", False)
    # `torch.tensor` would copy the number to a GPU, and wait for the copy.
    return torch.full((), age, device="cpu" if on_host else shard.parameter.device)

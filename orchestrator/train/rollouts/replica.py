"""The whole model on every rank, from which answers are generated under any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.parallel.device import Device
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.train.engines.engine import Engine
from workloads.workload import Workload

WEIGHTS = "model."
"""The beginning of the names of weights in an engine's state."""
MAX_AT_ONCE = 2**24
"""Maximum number of values that are sent together."""


class PieceLocation(NamedTuple):
    """Where a piece of a tensor belongs."""

    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece within its tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.extent, strict=True))

    @property
    def size(self) -> int:
        """Number of values."""
        return int(torch.Size(self.extent).numel())


class Replica:
    """A plain module with all weights in fp32, which `take` fills with those of an engine.

    Frozen weights are read once: an engine's state lacks them.
    """

    def __init__(self, workload: Workload, device: Device, seed: int) -> None:
        """Build the module on the rank's device, with the initial values of frozen weights."""
        with torch.device("meta"):
            self.model: nn.Module = workload.build()
        self.model.to_empty(device=device.device).eval().requires_grad_(False)
        tensors_by_name = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._tensors: dict[str, Tensor] = {n: t for n, t in tensors_by_name.items() if n in workload.shapes}
        self._device = device
        self._locations: list[list[PieceLocation]] = []
        """The pieces of every rank of the engine that was taken last."""
        self._engine: Engine | None = None
        for name, tensor in self._tensors.items():
            if name in workload.frozen:
                tensor.copy_(workload.initial(name, seed))

    @torch.no_grad()
    def take(self, engine: Engine) -> None:
        """Take the weights of an engine. All ranks call it together."""
        own_pieces = [piece for piece in engine.state() if piece.name.startswith(WEIGHTS)]
        if dist.get_world_size() == 1:
            for location, data in zip(
                map(location_of, own_pieces), (piece.data for piece in own_pieces), strict=True
            ):
                self._tensors[location.name][location.slices].copy_(data)
            return
        if engine is not self._engine:  # all ranks replace theirs at the same step, when parameters thaw
            self._engine = engine
            # The pieces of all ranks tile every trained tensor once, so each rank broadcasts its own and nobody
            # gathers.
            by_rank = gather_json([location_of(piece) for piece in own_pieces])
            self._locations = [
                [PieceLocation(name, tuple(start), tuple(extent)) for name, start, extent in rank_locations]
                for rank_locations in by_rank
            ]
        for rank, locations in enumerate(self._locations):
            pieces = own_pieces if rank == dist.get_rank() else []
            self._send(rank, locations, pieces)

    @torch.no_grad()
    def fill(self, locations: Iterable[PieceLocation], read: Callable[[Tensor], object]) -> None:
        """Fill pieces with values that `read` writes into fp32 tensors on the CPU, one after another.

        Args:
            locations: of the pieces.
            read: writes the values of the next piece into a tensor of its shape.
        """
        for location in locations:
            values = torch.empty(location.extent)
            read(values)
            self._tensors[location.name][location.slices].copy_(values)

    def _send(self, rank: int, locations: Sequence[PieceLocation], pieces: Sequence[TensorPiece]) -> None:
        """Send the pieces of one rank to all ranks, many at once."""
        for batch in _batches(locations):
            total = sum(location.size for location in locations[batch])
            if pieces:
                parts = [
                    piece.data.to(self._device.device, torch.float32).reshape(-1) for piece in pieces[batch]
                ]
                flat = torch.cat(parts)
            else:
                flat = torch.empty(total, device=self._device.device)
            # fp32 whatever the compute dtype: each sampler casts as training does, so that probabilities agree.
            dist.broadcast(flat, rank)
            for location, values in zip(
                locations[batch], flat.split([p.size for p in locations[batch]]), strict=True
            ):
                self._tensors[location.name][location.slices].copy_(values.view(location.extent))


def location_of(piece: TensorPiece) -> PieceLocation:
    """Return where a piece of an engine's weights belongs."""
    return PieceLocation(piece.name.removeprefix(WEIGHTS), tuple(piece.start), tuple(piece.data.shape))


def _batches(locations: Sequence[PieceLocation]) -> Iterator[slice]:
    """Yield stretches of the pieces with about MAX_AT_ONCE values each."""
    first = 0
    size = 0
    for number, location in enumerate(locations):
        size += location.size
        if size >= MAX_AT_ONCE:
            yield slice(first, number + 1)
            first = number + 1
            size = 0
    if first < len(locations):
        yield slice(first, len(locations))

"""The buffers of a model that a commit has, such as running statistics of the user's layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from workloads.workload import Workload


class ModelBuffers:
    """The buffers of this rank's part of a model. No layout divides them."""

    def __init__(self, stages: Iterable[nn.Module], workload: Workload) -> None:
        self._workload = workload
        # A buffer that follows from the configuration, such as a table of positions, is no tensor of the workload.
        self._buffers = {
            name: tensor
            for stage in stages
            for name, tensor in stage.named_buffers()
            if name in workload.shapes
        }

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the buffers with their initial values."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._workload.initial(name, seed))

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield copies of the buffers, because forward passes change them. One rank of each stage saves them."""
        yield from (full_piece(f"model.{name}", buffer.clone()) for name, buffer in self._buffers.items())

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Load the buffers from a commit."""
        for name, buffer in self._buffers.items():
            buffer.copy_(reader.read(f"model.{name}"))

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context manager for passes in training mode that must not change the buffers."""
        before = {name: buffer.clone() for name, buffer in self._buffers.items()}
        yield
        with torch.no_grad():
            for name, buffer in before.items():
                self._buffers[name].copy_(buffer)

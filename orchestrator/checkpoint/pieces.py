"""Named pieces of global tensors, which ranks save."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
PRUNE = "prune."
"""Prefix of the names of masks and scores of pruned weights: `prune.<name>.<slot>`."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPiece:
    """A piece of a global tensor.

    Attributes:
        name: such as "model.<name>" or "optim.<name>.<slot>".
        shape: the shape of the global tensor.
        start: offset of this piece in it, one per dimension.
        data: the piece, on any device, of any dtype that the safetensors format has.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: torch.Tensor

    def raw(self) -> RawPiece:
        """Return the piece as bytes. A contiguous CPU tensor is not copied and must not change until it is written."""
        flat = self.data.detach().cpu().contiguous().reshape(-1)
        return self.raw_with(flat.view(torch.uint8).numpy().data)

    def raw_with(self, data: memoryview) -> RawPiece:
        """Return the piece with bytes that are held elsewhere.

        Raises:
            InputError: the safetensors format has no such dtype.
        """
        if self.data.dtype not in DTYPE_NAMES:
            raise InputError(
                f"{self.data.dtype} cannot be stored", self.name, f"use one of {', '.join(DTYPES)}"
            )
        extent = tuple(self.data.shape)
        return RawPiece(
            self.name,
            DTYPE_NAMES[self.data.dtype],
            shape=tuple(self.shape),
            start=tuple(self.start),
            extent=extent,
            data=data,
        )


def full_piece(name: str, tensor: torch.Tensor) -> TensorPiece:
    """Return a piece that is a full tensor.

    Args:
        name: such as "model.<name>".
        tensor: the full tensor.
    """
    return TensorPiece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

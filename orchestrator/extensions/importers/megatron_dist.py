"""The tensors of a distributed checkpoint of Megatron-Core (`--ckpt-format torch_dist`), read on demand.

It is a folder of torch.distributed.checkpoint; nothing of it is unpickled, see `workloads.hf.files.dcp`. Tensors are
whole there: those of all layers lie in one, the first dimension of which counts layers, or in one for each layer where
layers differ (github.com/NVIDIA/Megatron-LM: sharded_state_dict in megatron/core/transformer/transformer_block.py).
Both halves of a gated feed-forward's first matrix follow each other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from orchestrator.extensions.importers.megatron_files import ABOUT
from orchestrator.extensions.importers.megatron_names import canonical_name
from workloads.errors import WorkloadError
from workloads.hf.files.dcp import SUFFIX, DcpTensors

FORMAT = "torch_dist"
_STACKED = re.compile(r"(decoder\.layers)\.(\D.*)")
_NOT_NEEDED = re.compile(r"(chained_\d+\.)?optimizer\..+|.*(_extra_state|inv_freq)(/.*)?")


class StoredModel(Mapping[str, Tensor]):
    """Return the tensors of the model by canonical names; each access reads the file. Raises WorkloadError for what
    is not known, is there
    twice, or is no such folder."""

    def __init__(self, folder: Path, layers: int) -> None:
        _check_format(folder)
        self._stored = DcpTensors(folder)
        self._places: dict[str, tuple[str, int | None]] = {}
        sizes = {
            name: shape for name, shape in self._stored.shapes.items() if not _NOT_NEEDED.fullmatch(name)
        }
        size = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
        if sum(map(math.prod, sizes.values())) > size:
            raise WorkloadError("its tensors have more numbers than its files have bytes; copy it again")
        for name, shape in sizes.items():
            for ours, number in self._parts(name, shape, layers):
                if ours in self._places:
                    raise WorkloadError(f"{name} is stored under two names")
                self._places[ours] = name, number

    def _parts(self, name: str, shape: tuple[int, ...], layers: int) -> Iterator[tuple[str, int | None]]:
        stacked = _STACKED.fullmatch(name)
        if not stacked:
            yield canonical_name(name), None
            return
        if stacked[2].startswith("final_"):  # of the block, not of its layers
            raise WorkloadError(f"{name} is not a tensor of GPT that is known here, and would be lost")
        if not shape or shape[0] != layers:
            raise WorkloadError(f"{name} is {list(shape)}, but its options say {layers} layers")
        for number in range(layers):
            yield canonical_name(f"{stacked[1]}.{number}.{stacked[2]}"), number

    def __getitem__(self, ours: str) -> Tensor:
        name, number = self._places[ours]
        full_slice = tuple(slice(0, size) for size in self._stored.shapes[name])
        part = full_slice if number is None else (slice(number, number + 1), *full_slice[1:])
        result = self._stored.part(name, part)
        if not result.is_floating_point():
            raise WorkloadError(f"{name} is not a plain tensor of real numbers")
        return result if number is None else result[0]

    def __contains__(self, ours: object) -> bool:
        return ours in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _check_format(folder: Path) -> None:
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        backend = about["sharded_backend"], about["sharded_backend_version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise WorkloadError(f"{ABOUT} does not state its format; copy it again") from None
    if backend != (FORMAT, 1):
        raise WorkloadError(
            f"it has the format {backend[0]!s:.40} version {backend[1]!s:.10}, but only {FORMAT} version 1 is "
            "imported; "
            "convert it by Megatron-LM"
        )

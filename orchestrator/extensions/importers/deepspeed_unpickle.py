"""The process that reads another project's DeepSpeed files, which are pickles: started by `deepspeed.py` only.

Reads {"folder", "target", "trust"} as JSON from standard input, writes safetensors and one line of JSON. Objects in the
files other than tensors and plain data become inert placeholders, so no code of theirs runs; with `trust` everything
is unpickled, and may run any code within this process.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workloads.hf.files.weight_files import write

KNOWN = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.config.DeepSpeedConfig",
    "argparse.Namespace",
)
"""Classes that DeepSpeed's own files refer to, other than tensors and plain data."""


class Refused(Exception):
    """The folder cannot be read; the message is one line."""


class PlaceholderClass(dict[str, Any]):
    """Placeholder of an object in the pickle: keeps its arguments and has no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


def main() -> None:
    """Answer one request: {"stage", "ranks", "tensors", "version"}, or {"refused"}."""
    request = json.load(sys.stdin)
    try:
        answer = convert(Path(request["folder"]), request["target"], request["trust"])
    except Refused as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


def convert(folder: Path, target: str, trust: bool) -> dict[str, Any]:
    """Write the fp32 weights of a ZeRO checkpoint, one tensor at a time. Raises Refused."""
    optimizers = [_load(path, trust)["optimizer_state_dict"] for path in _files(folder, "*_optim_states.pt")]
    models = [_load(path, trust) for path in _files(folder, "*_model_states.pt")]
    stage = _number(optimizers[0].get("zero_stage", 0))
    if stage not in (1, 2, 3):
        raise Refused(f"zero stage {stage} is none of 1, 2 and 3")
    counts = optimizers[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else counts
    if len(optimizers) != ranks:
        raise Refused(f"{ranks} ranks wrote it and {len(optimizers)} *_optim_states.pt files are there")
    tensors = dict(_tensors(stage, optimizers, models))
    shapes = {name: list(tensor().shape) for name, tensor in tensors.items()}
    write(((name, tensor()) for name, tensor in tensors.items()), target)
    return {"stage": stage, "ranks": ranks, "tensors": shapes, "version": str(models[0].get("ds_version"))}


def _files(folder: Path, pattern: str) -> list[Path]:
    result = sorted(folder.glob(pattern), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    parallel = [p.name for p in result if not re.search(r"mp_rank_00_", p.name)]
    if parallel:
        raise Refused(f"{parallel[0]} is of a model-parallel run; merge its parts with DeepSpeed first")
    if not result:
        raise Refused(f"there is no {pattern}")
    return result


def _load(path: Path, trust: bool) -> dict[str, Any]:
    placeholders: list[Any] = [(PlaceholderClass, name) for name in KNOWN]
    try:
        with torch.serialization.safe_globals(placeholders):
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except Exception as error:  # anything that a damaged or hostile pickle raises
        named = re.search(r"GLOBAL (\S+)", str(error)) or re.search(
            r"(?:Unsupported|class) ([\w.]+)", str(error)
        )
        if named and not trust:
            raise Refused(
                f"{path.name} would run {named[1]} when it is unpickled; if you trust who made it, add --trust"
            ) from None
        raise Refused(f"{path.name} cannot be read ({type(error).__name__})") from None
    return loaded


def _number(value: Any) -> int:
    return int(value.arguments[0]) if isinstance(value, PlaceholderClass) else int(value)


def _tensors(
    stage: int, optimizers: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Names of buffers, frozen and trained parameters, each with a function that makes its tensor."""
    first = models[0]
    for name in first.get("buffer_names") or []:
        yield name, lambda name=name: first["module"][name].float()
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [m["frozen_param_fragments"][name] for m in (models if stage == 3 else models[:1])]
        yield name, lambda parts=parts, shape=shape: _cut(parts, 0, shape)
    if stage == 3:
        yield from _of_parts(optimizers, first["param_shapes"])
    else:
        yield from _of_groups(optimizers, first["param_shapes"])


def _of_groups(optimizers: Sequence[Mapping[str, Any]], groups: Any) -> Iterator[tuple[str, Any]]:
    """ZeRO 1 and 2: the parameters of a group are concatenated, and cut into the partitions of the ranks."""
    paddings = optimizers[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        partitions = [o["single_partition_of_fp32_groups"][number] for o in optimizers]
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, lambda p=partitions, at=offset, shape=shape: _cut(p, at, shape)
            offset += math.prod(shape) + (paddings[number][index] if paddings else 0)
        if offset > sum(len(p) for p in partitions):
            raise Refused(f"group {number} needs {offset} elements and its files hold fewer")


def _of_parts(optimizers: Sequence[Mapping[str, Any]], groups: Any) -> Iterator[tuple[str, Any]]:
    """ZeRO 3: each rank has an equal part of every parameter, padded on the last rank."""
    flats = [_joined(o["fp32_flat_groups"]) for o in optimizers]
    offset = 0
    for shapes in groups:
        for name, shape in shapes.items():
            size = -(-math.prod(shape) // len(flats))
            yield (
                name,
                lambda at=offset, size=size, shape=shape: _cut([f[at : at + size] for f in flats], 0, shape),
            )
            offset += size
    if offset > len(flats[0]):
        raise Refused(f"the parameters need {offset} elements per rank, but the files hold {len(flats[0])}")


def _joined(groups: Any) -> Tensor:
    if isinstance(groups, Tensor):
        return groups
    return groups[0] if len(groups) == 1 else torch.cat(list(groups))


def _cut(parts: Sequence[Tensor], begin: int, shape: Sequence[int]) -> Tensor:
    """The tensor of that shape, fp32, from element `begin` on of the concatenation of flat `parts`."""
    out = torch.empty(math.prod(shape))
    end, at = begin + len(out), 0
    for part in parts:
        low, high = max(begin, at), min(end, at + part.numel())
        if low < high:
            out[low - begin : high - begin] = part.reshape(-1)[low - at : high - at]
        at += part.numel()
    return out.view(tuple(shape))


if __name__ == "__main__":
    main()

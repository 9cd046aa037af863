"""The process that reads checkpoints of Megatron-LM, which are pickles: started by `megatron.py` only.

Reads {"folder", "target", "vocabulary"} as JSON from standard input, writes model.safetensors, config.json and one line
of JSON. The files are read by torch's own reader of weights alone. The options of the run are the only other objects
that it builds; what else is plain data, and what is Megatron's, becomes an inert placeholder, and all else is
refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.extensions.importers.megatron_dist import StoredModel
from orchestrator.extensions.importers.megatron_experts import stored_shapes, with_all_experts
from orchestrator.extensions.importers.megatron_files import AGAIN, COMMON, FILES, RANK
from orchestrator.extensions.importers.megatron_names import canonical, merged
from orchestrator.extensions.importers.megatron_options import Options, number, options_of
from workloads.errors import WorkloadError
from workloads.hf.files.weight_files import write

Place = tuple[int, int, int]
"""Ranks of tensor, pipeline and expert parallelism."""
OPTIONS = "argparse.Namespace"
PLAIN = (
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "_codecs.encode",
    "_io.BytesIO",
    "datetime.timedelta",
    "pathlib.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
)
"""Names that torch's reader does not know and that stand for plain data: arrays of a generator's state, states of fp8
layers, and options. The import does not use them."""
OURS = ("megatron.", "transformer_engine.")
"""Packages whose classes, of which options have a few, become placeholders."""


@dataclass(frozen=True)
class Shards:
    """The models of all ranks, by tensor and pipeline rank, and the options that they are put together with; those of a
    distributed checkpoint are whole, of one rank. trained: the degrees of tensor and pipeline parallelism."""

    models: Mapping[tuple[int, int], Mapping[str, Tensor]]
    options: Options
    iteration: int
    trained: tuple[int, int]


class Placeholder:
    """Stands for an object of Megatron's: takes whatever it is made with, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Take nothing."""


def main() -> None:
    """Answer one request."""
    print(json.dumps(answer(json.load(sys.stdin))))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"iteration", "tensor_parallel", "pipeline_parallel", "version", "model_type", "tensors"}, or {"refused"}."""
    target = Path(request["target"])
    shapes: dict[str, list[int]] = {}
    try:
        folder = Path(request["folder"])
        shards = _read_whole(folder) if (folder / COMMON).is_file() else _read(folder)
        config, tensors = merged(shards.models, shards.options, request["vocabulary"])
        write(_of_class(tensors, config, shapes), str(target))
    except WorkloadError as error:
        return {"refused": str(error)}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {
        "iteration": shards.iteration,
        "tensor_parallel": shards.trained[0],
        "pipeline_parallel": shards.trained[1],
        "version": shards.options.version,
        "model_type": config["model_type"],
        "tensors": shapes,
    }


def _of_class(
    tensors: Iterator[tuple[str, Tensor]], config: Mapping[str, Any], shapes: dict[str, list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, whose shapes are noted. Raises WorkloadError if they are not those of transformers' class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # whatever transformers says of sizes that do not go together
        raise WorkloadError(
            f"transformers cannot build a {config['model_type']} from its options ({_line(error)})"
        ) from None
    wanted = stored_shapes({name: list(parameter.shape) for name, parameter in model.named_parameters()})
    for name, tensor in tensors:
        shapes[name] = list(tensor.shape)
        if shapes[name] != wanted.get(name):
            raise WorkloadError(f"{name} is {shapes[name]}, but its options make it {wanted.get(name)}")
        yield name, tensor
    if lacking := sorted(wanted.keys() - shapes.keys()):
        raise WorkloadError(f"{lacking[0]} is missing")


def _read(folder: Path) -> Shards:
    parts: dict[tuple[Place, int], Mapping[str, Tensor]] = {}
    options_of: dict[Place, Mapping[str, Any]] = {}
    about: dict[Place, tuple[Options, int, int]] = {}
    for numbers, path in sorted(_files(folder)):
        stored, where = _load(path), f"{path.parent.name}/{path.name}"
        its_args, its_options, step = _options_in(stored, where)
        rank_of_file = _place(numbers, its_options, where)
        chunks = _chunks(stored, where)
        options_of[rank_of_file], about[rank_of_file] = its_args, (its_options, step, len(chunks))
        max_bytes = path.stat().st_size
        parts |= {(rank_of_file, number): canonical(chunk, max_bytes) for number, chunk in enumerate(chunks)}
    first, *others = sorted(about)
    options, iteration, virtual = about[first]
    if unlike := next((rank for rank in others if about[rank] != about[first]), None):
        raise WorkloadError(
            f"{_ranks(unlike)} has other options or another iteration than {_ranks(first)}; copy all files again"
        )
    degrees = options.tensor, options.pipeline, options.expert_parallel
    every: set[Place] = set(itertools.product(*map(range, degrees)))  # type: ignore[arg-type]
    for problem, value in (("is missing", every - about.keys()), ("is one too many", about.keys() - every)):
        if value:
            rank = _ranks(min(value))
            raise WorkloadError(f"the file of {rank} {problem}, of {len(every)}; copy all files again")
    _check_places(options_of)
    models = {
        # layers go through all ranks of a pipeline before they come back to the first with its next stage
        (tp, number * options.pipeline + pp): with_all_experts(
            [parts[(tp, pp, ep), number] for ep in range(options.expert_parallel)], options
        )
        for tp, pp in itertools.product(*map(range, degrees[:2]))
        for number in range(virtual)
    }
    stages = dataclasses.replace(options, pipeline=options.pipeline * virtual)
    return Shards(models, stages, iteration, degrees[:2])


def _place(numbers: tuple[int, ...], options: Options, where: str) -> Place:
    """The ranks of tensor, pipeline and expert parallelism that the name of a file's folder has, see `RANK`."""
    tensor, *rest = numbers
    pipeline = rest.pop(0) if rest and options.pipeline > 1 else 0
    expert = rest.pop(0) if rest and options.expert_parallel > 1 else 0
    if rest and (any(rest) or options.pipeline > 1):
        raise WorkloadError(f"{where} belongs to more ranks than its options say; copy all files again")
    return tensor, pipeline, expert


def _chunks(stored: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The model of a rank, or what it has of several stages of a pipeline, in order."""
    names = ["model"] if "model" in stored else [f"model{n}" for n in itertools.takewhile(
        lambda n: f"model{n}" in stored, itertools.count())]  # fmt: skip
    result = [stored[name] for name in names]
    if not result or not all(isinstance(each, Mapping) for each in result):
        raise WorkloadError(f"{where} has no model; {AGAIN}")
    return result


def _options_in(stored: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Options, int]:
    """The options of a run as they stand in a file, what follows from them, and the iteration."""
    if not isinstance(stored.get("args"), argparse.Namespace):
        raise WorkloadError(
            f"{where} holds no options (args), without which its layout is not known; save it again"
        )
    options = vars(stored["args"])
    version = float(number(stored, "checkpoint_version", 0.0))
    return options, options_of(options, version), int(number(stored, "iteration", 0))


def _read_whole(folder: Path) -> Shards:
    """A distributed checkpoint, whose tensors are those of the model whatever the ranks were."""
    where = f"{folder.name}/{COMMON}"
    _, options, iteration = _options_in(_load(folder / COMMON), where)
    if options.version < 2.0:
        raise WorkloadError(
            f"{where} has version {options.version}, which is older than Megatron-Core; save it again"
        )
    model = StoredModel(folder, options.layers)
    if options.experts:
        raise WorkloadError(
            f"num_experts {options.experts} is imported from the format torch, not from torch_dist"
        )
    alone = dataclasses.replace(options, tensor=1, pipeline=1)
    return Shards({(0, 0): model}, alone, iteration, (options.tensor, options.pipeline))


def _ranks(rank: Place) -> str:
    expert = f", expert-parallel rank {rank[2]}" if rank[2] else ""
    return f"tensor-parallel rank {rank[0]} and pipeline rank {rank[1]}{expert}"


def _check_places(options_of: Mapping[Place, Mapping[str, Any]]) -> None:
    """Raise WorkloadError if files are in each other's folders.

    Megatron numbers ranks by tensor, then expert, then pipeline parallelism. Converted checkpoints store no ranks, and
    are not checked.
    """
    ranks = {position: args.get("rank") for position, args in options_of.items()}
    if len(set(map(str, ranks.values()))) < len(ranks) or any(
        type(rank) is not int for rank in ranks.values()
    ):
        return
    positions = sorted(ranks, key=lambda position: (position[1], position[2], position[0]))
    for position, rank in zip(positions, sorted(ranks.values()), strict=True):  # type: ignore[type-var]
        if ranks[position] != rank:
            raise WorkloadError(
                f"the file of {_ranks(position)} was written by rank {ranks[position]}, not {rank}; copy all files "
                "again"
            )


def _files(folder: Path) -> Iterator[tuple[tuple[int, ...], Path]]:
    for path in folder.iterdir():
        if match := RANK.fullmatch(path.name):
            file = next((path / name for name in FILES if (path / name).is_file()), None)
            if file is None:
                raise WorkloadError(f"{path.name} has no {FILES[0]}; copy it again")
            yield tuple(int(number) for number in match.groups() if number), file


def _load(path: Path) -> dict[str, Any]:
    """The content of a file, without its tensors' data."""
    where = f"{path.parent.name}/{path.name}"
    try:
        with zipfile.ZipFile(path) as file:
            packed = [each.filename for each in file.infolist() if each.compress_type != zipfile.ZIP_STORED]
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:  # a damaged file ends in any error
        raise WorkloadError(f"{where} is not a file of torch.save ({_line(error)}); copy it again") from None
    if packed:
        raise WorkloadError(f"{where} is compressed, which torch.save does not do; copy it again")
    allowed: list[Any] = []
    for name in unsafe:
        if name == OPTIONS:
            allowed.append((argparse.Namespace, name))
        elif name in PLAIN or name.startswith(OURS):
            allowed.append((type("Placeholder", (Placeholder,), {}), name))
        else:
            raise WorkloadError(
                f"{where} asks for {name}, which is not plain data, and nothing was run; do not "
                "use files from this source"
            )
    with torch.serialization.safe_globals(allowed):
        try:
            result = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged file ends in any error
            raise WorkloadError(f"{where} cannot be read ({_line(error)}); copy it again") from None
    if not isinstance(result, dict):
        raise WorkloadError(f"{where} holds no checkpoint of Megatron-LM; {AGAIN}")
    return result


def _line(error: Exception) -> str:
    """The reason alone: torch adds advice on how to load what is not plain."""
    reason = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    return " ".join(f"{type(error).__name__}: {reason}".split())[:160]


if __name__ == "__main__":
    main()

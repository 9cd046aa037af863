"""What a folder with an export holds: its runtime, its size on disk, and its number of parameters."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.storage.uri import is_local, local_path

ONNX_MODEL = "model.onnx"
GGUF_MODEL = "model.gguf"
FORMS = ("hf", "onnx")
"""The values of `checkpoint.export` whose folders are measured."""
WEIGHTS = ("*.safetensors", "*.onnx", "*.onnx.data", "*.onnx_data")
"""Patterns of the files that hold weights."""


class Runtime(StrEnum):
    """The library that runs an export."""

    TRANSFORMERS = "transformers"
    ONNX = "onnxruntime"


@dataclass(frozen=True)
class ExportFolder:
    """An export on this machine.

    Attributes:
        name: how tables and pictures name it.
        path: its folder.
        runtime: what runs it.
        weights_bytes: bytes of its files with weights.
        parameters: number of parameters of the model, before any rounding or packing of its weights.
    """

    name: str
    path: str
    runtime: Runtime
    weights_bytes: int
    parameters: int


def read_exports(uris: list[str]) -> list[ExportFolder]:
    """Return the exports in these folders, named by the shortest ends of their paths that differ.

    Raises InputError for a folder that holds no export which can be measured here, and for a folder named twice.
    """
    paths = [_folder(uri) for uri in uris]
    if twice := next((uri for uri, path in zip(uris, paths, strict=True) if paths.count(path) > 1), ""):
        raise InputError("is named twice", twice, "name each export once")
    names = _distinct_names(paths)
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _folder(uri: str) -> Path:
    if not is_local(uri):
        raise InputError("is not on this machine", uri, "copy the export to a folder here first")
    path = Path(local_path(uri)).resolve()
    if not path.is_dir():
        raise InputError("is not a folder", uri, "name the folder of an export")
    return path


def _distinct_names(paths: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("distinct paths have distinct names")


def _read(path: Path, name: str) -> ExportFolder:
    if (path / GGUF_MODEL).is_file():
        hint = "measure that one with llama-bench of llama.cpp"
        raise InputError("is a GGUF file, but no runtime for it is part of this project", str(path), hint)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        hint = "name the folder of an export for transformers or onnxruntime"
        raise InputError(f"has no readable config.json ({error})", str(path), hint) from None
    runtime = Runtime.ONNX if (path / ONNX_MODEL).is_file() else Runtime.TRANSFORMERS
    if runtime is Runtime.ONNX and find_spec("onnxruntime") is None:
        raise InputError("needs onnxruntime", str(path), install("onnx"))
    size = sum(file.stat().st_size for pattern in WEIGHTS for file in path.glob(pattern))
    if not size:
        raise InputError("has a configuration but no weights", str(path), "name the folder of an export")
    return ExportFolder(name, str(path), runtime, size, _parameters(path, config))


def _parameters(path: Path, config: dict[str, Any]) -> int:
    """Return the number of parameters of the model's class, built without memory. Tied parameters count once."""
    import torch
    import transformers

    name = next(iter(config.get("architectures") or ()), "")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise InputError(
            f"is of the class {name!r}, which transformers does not have",
            str(path),
            "measure a model of transformers' own classes",
        )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(kind.config_class(**{k: v for k, v in config.items() if k != "quantization_config"}))
    return sum(parameter.numel() for parameter in model.parameters())

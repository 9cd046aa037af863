"""An export form, `checkpoint.export: npz`, and a command, `orchestrator checkpoint list-npz FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.config.errors import InputError
from orchestrator.export.kinds import ExportForm, Plain, Written

FILE = "model.npz"


def check(about: Mapping[str, Any], paired: bool) -> None:
    """Take every model that transformers has."""


def write(plain: Plain) -> Written:
    """Write all tensors to one file, and read them back.

    Args:
        plain: the export for transformers; `numbers` is f32 or f16.

    Raises:
        RuntimeError: a tensor reads back differently.
    """
    import numpy as np

    from workloads.hf.files.weight_files import Weights

    weights = Weights(plain.folder)
    dtype = np.float16 if plain.numbers == "f16" else np.float32
    arrays = {name: weights.read(name).float().numpy().astype(dtype) for name in weights.names}
    np.savez(Path(plain.target) / FILE, **arrays)
    with np.load(Path(plain.target) / FILE) as stored:
        if wrong := [name for name, array in arrays.items() if not np.array_equal(stored[name], array)]:
            raise RuntimeError(f"{wrong[0]} reads back as something else")
    return Written()


FORM = ExportForm(library="numpy", check=check, write=write, numbers=("f32", "f16"), usual="f32")


def list_npz(file: Annotated[Path, typer.Argument(help="a file model.npz")]) -> None:
    """List the arrays of an export as npz."""
    import numpy as np

    if not file.is_file():
        raise InputError("there is no such file", str(file), f"give the {FILE} of an export")
    with np.load(file) as stored:
        for name in stored:
            print(f"{name} {'x'.join(map(str, stored[name].shape))}")

"""The export form compressed-tensors, which `quantize` and --quantize ask for."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.export.kinds import ExportForm, Plain, Written


def _check(about: Mapping[str, Any], paired: bool) -> None:
    """Any class can be exported; `_check_quantised` says which of its weights can be rounded."""


def _check_quantised(about: Mapping[str, Any], weights: Collection[str]) -> None:
    from orchestrator.extensions.compressed_tensors.write import layers_in_full_precision

    layers_in_full_precision(about, weights)


def _write(plain: Plain) -> Written:
    from orchestrator.extensions.compressed_tensors.write import export_compressed
    from workloads.hf.check.compare import TOLERANCE

    assert plain.scheme is not None
    assert plain.chosen is not None
    kept = export_compressed(plain.folder, plain.target, plain.chosen)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of compressed-tensors
            apart = plain.difference(plain.scheme)
            rounding = plain.difference(None)
    except AttributeError as error:  # of classes whose initialisation reads weights that are not there
        raise RuntimeError(
            f"transformers cannot load this class in this form ({error}); nothing was published"
        ) from error
    if not apart <= TOLERANCE:
        raise RuntimeError(
            f"the quantised model's outputs differ by {apart:.2e} in transformers; nothing was published"
        )
    return Written(apart, rounding, kept)


FORM = ExportForm(
    library="transformers",
    check=_check,
    write=_write,
    check_quantised=_check_quantised,
    packages=("compressed-tensors", "transformers"),
    extra="quantize",
)

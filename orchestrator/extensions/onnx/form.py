"""The export form onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.export.kinds import ExportForm, Plain, Written

DYNAMIC, STATIC = "int8", "int8_static"


def _check(about: Mapping[str, Any], paired: bool) -> None:
    from orchestrator.extensions.onnx.write import check_onnx

    check_onnx(about, paired)


def _write(plain: Plain) -> Written:
    from orchestrator.extensions.onnx.write import export_onnx

    if plain.chosen is not None:
        return export_onnx(plain.folder, plain.target, plain.chosen)
    export_onnx(plain.folder, plain.target)
    if plain.numbers not in (DYNAMIC, STATIC):
        return Written()
    from orchestrator.extensions.onnx.quantise import kept_in_model, quantise_onnx

    rounding = quantise_onnx(plain.target, plain.samples if plain.numbers == STATIC else None)
    return Written(rounding=rounding, kept=kept_in_model(plain.target))


FORM = ExportForm(
    library="onnx",
    check=_check,
    write=_write,
    packages=("onnx", "onnxruntime"),
    extra="onnx",
    numbers=("f32", DYNAMIC, STATIC),
    usual="f32",
    rounded=(DYNAMIC, STATIC),
    stores=lambda scheme: scheme.weights == "int8" and not scheme.group,
)

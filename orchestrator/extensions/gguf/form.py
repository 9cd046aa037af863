"""The export form gguf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.export.kinds import ExportForm, Plain, Written


def _check(about: Mapping[str, Any], paired: bool) -> None:
    from orchestrator.extensions.gguf.write import check_gguf

    check_gguf(about)


def _write(plain: Plain) -> Written:
    from orchestrator.extensions.gguf.write import export_gguf, kept_in_file

    rounding = export_gguf(plain.folder, plain.target, plain.numbers, plain.chosen)  # type: ignore[arg-type]
    return Written(rounding=rounding, kept=kept_in_file(plain.target, plain.numbers))


FORM = ExportForm(
    library="llama.cpp",
    check=_check,
    write=_write,
    packages=("gguf", "accelerate"),
    extra="gguf",
    numbers=("f32", "f16", "bf16", "q8_0", "q4_0"),
    usual="f16",
    rounded=("q8_0", "q4_0"),
    stores=lambda scheme: scheme.is_of_gguf,
)

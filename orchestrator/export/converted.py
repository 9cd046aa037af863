"""Exports in the formats of others than transformers: each is made from a checked export for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

from orchestrator.job.errors import InputError
from orchestrator.resolve.resolved_job import wrong_input

Converted: TypeAlias = Literal["dcp", "gguf", "onnx"]
Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]
Numbers: TypeAlias = Literal["f32", "f16", "bf16", "q8_0"]
EXTRAS = {"gguf": ("gguf", "accelerate"), "onnx": ("onnx", "onnxruntime")}
"""What must be installed for a form, by the extra of its name."""
FORM, NAMES, NUMBERS = "--form", "--names", "--numbers"


@dataclass(frozen=True)
class Conversion:
    """A format that is no folder for transformers. names: those of the tensors in a DCP folder. numbers: the format of
    the matrices in a GGUF file."""

    form: Converted
    names: Names = "hf"
    numbers: Numbers = "f16"


def asked_form(form: str | None, names: Names | None, numbers: Numbers | None) -> Any:
    """What `export` takes for these options of the command. Raises InputError if they do not go together, or if a
    package is not installed."""
    for value, option, of in ((names, NAMES, "dcp"), (numbers, NUMBERS, "gguf")):
        if value is not None and form != of:
            raise InputError(f"{value} is for {FORM} {of}", option, f"leave it out, or add {FORM} {of}")
    if form in (None, "hf", "adapter"):
        return form
    if form not in get_args(Converted):
        raise InputError(
            f"there is no form {form!r}", FORM, f"use hf, adapter, {', '.join(get_args(Converted))}"
        )
    if form in EXTRAS:
        check_extra(EXTRAS[form], form)
    return Conversion(form, names or "hf", numbers or "f16")  # type: ignore[arg-type]


def convert(asked: Conversion, plain: str, folder: str) -> float | None:
    """Write what is in `plain`, an export for transformers, to `folder` in another format, and check it.

    Returns the largest difference of its outputs where it has rounded numbers, as a share of the largest number.

    Raises InputError if the format has no such model, RuntimeError if what was written is not what was to be written.
    """
    with wrong_input(FORM):
        if asked.form == "gguf":
            from workloads.hf.gguf_export import export_gguf

            return export_gguf(plain, folder, asked.numbers)
        if asked.form == "onnx":
            from workloads.hf.onnx_export import export_onnx

            export_onnx(plain, folder)
            return None
        from workloads.hf.dcp_export import export_dcp

        export_dcp(plain, folder, asked.names)
        return None


def check_extra(modules: tuple[str, ...], extra: str) -> None:
    """Raise InputError if a package that a form needs is not installed."""
    for module in modules:
        if find_spec(module) is None:
            hint = f"pip install 'training-orchestrator[{extra}]'"
            raise InputError(f"needs {module}, which is not installed", FORM, hint)

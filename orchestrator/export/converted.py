"""Exports in formats other than transformers'. Each is made from a checked export for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.resolve.resolved_job import wrong_input
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from workloads.workload import Workload

Converted: TypeAlias = Literal["dcp", "gguf", "onnx"]
Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]
Numbers: TypeAlias = Literal["f32", "f16", "bf16", "q8_0"]
EXTRAS = {"gguf": ("gguf", "accelerate"), "onnx": ("onnx", "onnxruntime")}
"""The packages that a format needs, installed by the extra of its name."""
FORM = "--form"
NAMES = "--names"
NUMBERS = "--numbers"
EXPORT = "checkpoint.export"


@dataclass(frozen=True)
class Conversion:
    """A format other than a folder for transformers. `names` is the naming of tensors in a DCP folder, `numbers` the
    format of matrices in a GGUF file.
    """

    form: Converted
    names: Names = "hf"
    numbers: Numbers = "f16"


def asked_form(form: str | None, names: Names | None, numbers: Numbers | None) -> Any:
    """Return the argument of `export` for these options of the command.

    Raises InputError if they do not fit together, or if a package is not installed.
    """
    for value, option, of, kinds in ((names, NAMES, "dcp", Names), (numbers, NUMBERS, "gguf", Numbers)):
        if value is not None and form != of:
            raise InputError(f"{value} is for {FORM} {of}", option, f"leave it out, or add {FORM} {of}")
        if value is not None and value not in get_args(kinds):
            raise InputError(f"there is no {value!r}", option, f"use {', '.join(get_args(kinds))}")
    if form in (None, "hf", "adapter"):
        return form
    if form not in get_args(Converted):
        raise InputError(
            f"there is no form {form!r}", FORM, f"use hf, adapter, {', '.join(get_args(Converted))}"
        )
    if form in EXTRAS:
        check_extra(EXTRAS[form], form)
    return Conversion(form, names or "hf", numbers or "f16")  # type: ignore[arg-type]


def form_of(checkpoint: CheckpointSpec) -> Any:
    """Return the same for a job's keys."""
    form = checkpoint.export
    if form not in get_args(Converted):
        return form
    return Conversion(form, checkpoint.export_names or "hf", checkpoint.export_numbers or "f16")  # type: ignore[arg-type]


def check_conversion(asked: Conversion, workload: Workload) -> None:
    """Raise InputError or WorkloadError if the format does not support the model, judging by its configuration and
    names.

    The tokenizer is checked later, when there is one.
    """
    from workloads.hf.name_maps import written

    if asked.form in EXTRAS:
        check_extra(EXTRAS[asked.form], asked.form, EXPORT)
    paired = bool(getattr(workload.config, "generator", 0))
    about = workload.hf_config()
    if asked.form == "gguf":
        from workloads.hf.gguf_export import check_gguf

        check_gguf(about)
    elif asked.form == "onnx":
        from workloads.hf.onnx_export import check_onnx

        check_onnx(about, paired)
    elif paired:
        raise WorkloadError("a pair of two networks has no common names; set checkpoint.export to hf")
    elif asked.names != "hf":
        written(asked.names, workload.hf_tensors(), about)


def convert(asked: Conversion, plain: str, folder: str) -> float | None:
    """Write the export for transformers in `plain` to `folder` in another format, and check it.

    Returns the largest difference of its outputs if it has rounded numbers, as a share of the largest number. Raises
    InputError if the format does not support the model, RuntimeError if the result is wrong.
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


def check_extra(modules: tuple[str, ...], extra: str, where: str = FORM) -> None:
    """Raise InputError if a package that a format needs is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise InputError(f"needs {module}, which is not installed", where, install(extra))

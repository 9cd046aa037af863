"""Exports in formats other than transformers'. Each is made from a checked export for transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from orchestrator.checkpoint.config import NUMBERS as NUMBERS_OF
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.resolve.resolved_job import wrong_input
from workloads.errors import WorkloadError
from workloads.model.scheme import Scheme

if TYPE_CHECKING:
    from workloads.workload import Batch, Workload

Converted: TypeAlias = Literal["dcp", "gguf", "onnx"]
Quantised: TypeAlias = Literal["hf"]
"""The form that is converted only to be quantised."""
Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]
Numbers: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "int8", "int8_static"]
ROUNDED = ("q8_0", "q4_0", "int8", "int8_static")
"""Formats of quantised matrices."""
EXTRAS = {
    "gguf": ("gguf", "accelerate"),
    "onnx": ("onnx", "onnxruntime"),
    "quantize": ("compressed_tensors",),
}
"""The packages that a format needs, installed by the extra of its name."""
FORM = "--form"
NAMES = "--names"
NUMBERS = "--numbers"
EXPORT = "checkpoint.export"


@dataclass(frozen=True)
class Conversion:
    """A format other than a plain folder for transformers.

    Attributes:
        names: the naming of tensors in a DCP folder.
        numbers: the format of matrices in a GGUF file or an ONNX model.
        scheme: how linear layers are quantised; "none" if they are not, although the job trains for it; None for the
            job's.
    """

    form: Converted | Quantised
    names: Names = "hf"
    numbers: Numbers = "f16"
    scheme: Scheme | Literal["none"] | None = None


def asked_form(
    form: str | None,
    names: Names | None,
    numbers: Numbers | None,
    scheme: Scheme | Literal["none"] | None = None,
) -> Any:
    """Return the argument of `export` for these options of the command.

    Raises InputError if they do not fit together, or if a package is not installed.
    """
    if names is not None and form != "dcp":
        raise InputError(f"{names} is for {FORM} dcp", NAMES, f"leave it out, or add {FORM} dcp")
    if names is not None and names not in get_args(Names):
        raise InputError(f"there is no {names!r}", NAMES, f"use {', '.join(get_args(Names))}")
    if numbers is not None and form not in NUMBERS_OF:
        of = next((each for each, known in NUMBERS_OF.items() if numbers in known), "gguf")
        raise InputError(f"{numbers} is for {FORM} {of}", NUMBERS, f"leave it out, or add {FORM} {of}")
    if numbers is not None and numbers not in NUMBERS_OF[str(form)]:
        raise InputError(f"there is no {numbers!r}", NUMBERS, f"use {', '.join(NUMBERS_OF[str(form)])}")
    if form in (None, "hf") and scheme is not None:
        return Conversion("hf", scheme=scheme)
    if form in (None, "hf", "adapter"):
        return form
    if form not in get_args(Converted):
        raise InputError(
            f"there is no form {form!r}", FORM, f"use hf, adapter, {', '.join(get_args(Converted))}"
        )
    if form in EXTRAS:
        check_extra(EXTRAS[form], form)
    return Conversion(form, names or "hf", numbers or "f16", scheme)  # type: ignore[arg-type]


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


def convert(
    asked: Conversion,
    plain: str,
    folder: str,
    chosen: Collection[str] | None = None,
    samples: Iterable[Batch] = (),
) -> float | None:
    """Write the export for transformers in `plain` to `folder` in another format, and check it.

    Args:
        asked: the format.
        plain: the export for transformers.
        folder: where to write.
        chosen: transformers' names of the weights that a GGUF file rounds; None for all.
        samples: batches over which the ranges of activations are measured.

    Returns the largest difference of its outputs if it has rounded numbers, as a share of the largest number. Raises
    InputError if the format does not support the model, RuntimeError if the result is wrong.
    """
    with wrong_input(FORM):
        if asked.form == "gguf":
            from workloads.hf.gguf_export import export_gguf

            return export_gguf(plain, folder, asked.numbers, chosen)  # type: ignore[arg-type]
        if asked.form == "onnx":
            from workloads.hf.onnx_export import export_onnx

            export_onnx(plain, folder)
            if asked.numbers not in ROUNDED:
                return None
            from workloads.hf.onnx_quantised import quantise_onnx

            return quantise_onnx(folder, samples if asked.numbers == "int8_static" else None)
        from workloads.hf.dcp_export import export_dcp

        export_dcp(plain, folder, asked.names)
        return None


def check_extra(modules: tuple[str, ...], extra: str, where: str = FORM) -> None:
    """Raise InputError if a package that a format needs is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise InputError(f"needs {module}, which is not installed", where, install(extra))

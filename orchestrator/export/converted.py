"""Exports in forms other than a plain folder for transformers. Each is made from a checked export for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.export.kinds import OF_THE_CORE, ExportForm, form_named, names, with_numbers
from workloads.errors import WorkloadError
from workloads.model.scheme import Scheme

if TYPE_CHECKING:
    from workloads.workload import Workload

Names: TypeAlias = Literal["hf", "torchtitan", "olmo"]
DCP = "dcp"
FORM = "--form"
NAMES = "--names"
NUMBERS = "--numbers"
MEAN_BITS = "--mean-bits"
MAX_BYTES = "--max-bytes"
EXPORT = "checkpoint.export"


@dataclass(frozen=True)
class Conversion:
    """A form other than a plain folder for transformers.

    Attributes:
        form: dcp, a form of an extension, or hf, which is converted only to be quantised.
        names: the naming of tensors in a DCP folder.
        numbers: the format of matrices; None for the form's usual one.
        scheme: how linear layers are quantised; "none" if they are not, although the job trains for it; None for the
            job's.
        mean_bits: weights of `scheme` that lose most in int4 get int8, up to this mean of bits; None for no other.
        max_bytes: the same, up to this many bytes of all tensors of the export.
    """

    form: str
    names: Names = "hf"
    numbers: str | None = None
    scheme: Scheme | Literal["none"] | None = None
    mean_bits: float | None = None
    max_bytes: int | None = None


def form_option(
    form: str | None,
    names: str | None,
    numbers: str | None,
    scheme: Scheme | Literal["none"] | None = None,
    mean_bits: float | None = None,
    max_bytes: int | None = None,
) -> Any:
    """Return the argument of `export` for the options of a command. None stands for an option that is not given.

    Args:
        form: the form of the export, such as hf, adapter, dcp or gguf.
        names: the names of the tensors in a dcp export.
        numbers: the format of the matrices, in forms that have several.
        scheme: the quantisation of an hf export, or none for full precision.
        mean_bits: mean number of bits per weight, 4 to 8.

    Raises:
        InputError: the options do not fit together, or a package is not installed.
    """
    if names is not None and form != DCP:
        raise InputError(f"{names} is for {FORM} dcp", NAMES, f"leave it out, or add {FORM} dcp")
    if names is not None and names not in get_args(Names):
        raise InputError(f"there is no {names!r}", NAMES, f"use {', '.join(get_args(Names))}")
    if numbers is not None:
        _check_numbers(form, numbers)
    if mean_bits is not None:
        _check_mean_bits(mean_bits, scheme)
    if max_bytes is not None:
        _check_max_bytes(max_bytes, mean_bits, scheme)
    if form in (None, "hf") and scheme is not None:
        return Conversion("hf", scheme=scheme, mean_bits=mean_bits, max_bytes=max_bytes)
    if form in (None, "hf", "adapter", "safetensors"):
        return form
    if form not in forms_of_commits():
        raise InputError(f"there is no form {form!r}", FORM, f"use {', '.join(forms_of_commits())}")
    if form != DCP:
        check_packages(form_named(form), FORM)
    return Conversion(form, names or "hf", numbers, scheme)  # type: ignore[arg-type]


def forms_of_commits() -> list[str]:
    """Return the forms of `checkpoint export --form`. Those of own models are hf and safetensors."""
    return names()


def _check_numbers(form: str | None, numbers: str) -> None:
    """Raise InputError if a form has no such format of matrices."""
    known = with_numbers()
    if form not in known:
        of = next((each for each, formats in known.items() if numbers in formats), next(iter(known)))
        raise InputError(f"{numbers} is for {FORM} {of}", NUMBERS, f"leave it out, or add {FORM} {of}")
    if numbers not in known[str(form)]:
        raise InputError(f"there is no {numbers!r}", NUMBERS, f"use {', '.join(known[str(form)])}")


def _check_mean_bits(mean_bits: float, scheme: Scheme | Literal["none"] | None) -> None:
    """Raise InputError if no weights in int4 can have this mean of bits."""
    _check_int4(scheme, MEAN_BITS)
    if not 4 < mean_bits < 8:
        raise InputError(
            f"{mean_bits:g} is not between 4 and 8, the bits of int4 and int8", MEAN_BITS, "give such as 5"
        )


def _check_max_bytes(
    max_bytes: int, mean_bits: float | None, scheme: Scheme | Literal["none"] | None
) -> None:
    """Raise InputError if a number of bytes cannot bound an export. Whether int4 fits is known once it is made."""
    _check_int4(scheme, MAX_BYTES)
    if mean_bits is not None:
        raise InputError(f"and {MEAN_BITS} each say how many weights get int8", MAX_BYTES, "give one of them")
    if max_bytes < 1:
        raise InputError(f"{max_bytes} is no number of bytes", MAX_BYTES, "give the bytes of the export")


def _check_int4(scheme: Scheme | Literal["none"] | None, option: str) -> None:
    if not isinstance(scheme, Scheme) or scheme.weights != "int4":
        raise InputError("is for --quantize int4", option, "add --quantize int4, or leave it out")


def form_of(checkpoint: CheckpointSpec) -> Any:
    """Return the same for a job's keys."""
    form = checkpoint.export
    if form is None or (form in OF_THE_CORE and form != DCP):
        return form
    return Conversion(form, checkpoint.export_names or "hf", checkpoint.export_numbers)


def check_conversion(conversion: Conversion, workload: Workload) -> None:
    """Check that a form supports the model, judging by its configuration and names. The tokenizer is checked later.

    Args:
        conversion: the form and its options.
        workload: the model.

    Raises:
        InputError, WorkloadError: it does not.
    """
    paired = bool(getattr(workload.config, "generator", 0))
    if conversion.form != DCP:
        form = form_named(conversion.form)
        check_packages(form, EXPORT)
        form.check(workload.hf_config(), paired)
    elif paired:
        raise WorkloadError(
            "a generator and its discriminator have no common names; set checkpoint.export to hf"
        )
    elif conversion.names != "hf":
        from workloads.hf.files.name_maps import written

        written(conversion.names, workload.hf_tensors(), workload.hf_config())


def check_packages(form: ExportForm, where: str) -> None:
    """Raise InputError if a package that a form needs is not installed."""
    for package in form.packages:
        if find_spec(package.replace("-", "_")) is None:
            hint = install(form.extra) if form.extra else f"pip install {package}"
            raise InputError(f"needs {package}, which is not installed", where, hint)

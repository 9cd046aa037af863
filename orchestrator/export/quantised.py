"""Exports with quantised weights: for transformers in compressed-tensors' form, as GGUF, and as ONNX."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.export.converted import (
    EXTRAS,
    FORM,
    ROUNDED,
    Conversion,
    check_extra,
    convert,
    form_of,
)
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.resolved_job import wrong_input
from workloads.errors import WorkloadError
from workloads.model.scheme import Scheme

if TYPE_CHECKING:
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.resolve.commit_model import CommitModel
    from workloads.workload import Batch, Workload

QUANTIZE = "--quantize"
FULL: Literal["none"] = "none"
"""The value of the option for an export in full precision."""
CALIBRATED = 128
"""Training samples over which ranges of activations are measured."""
AT_ONCE = 8
"""Samples of a batch of these. Only its minima and maxima are kept."""


def asked_scheme(
    form: str | None, quantize: str | None, group: str | None, activations: str | None
) -> Scheme | Literal["none"] | None:
    """Return the quantisation that options of the command name; None for that of the job.

    Raises InputError if they do not fit together.
    """
    if quantize is None:
        given = "--group" if group is not None else "--activations" if activations is not None else ""
        if given:
            raise InputError(f"is for {QUANTIZE}", given, f"add {QUANTIZE} int8 or int4, or leave it out")
        return None
    if quantize == FULL:
        return FULL
    if form not in (None, "hf"):
        hint = "name the format by --numbers" if form in ("gguf", "onnx") else f"add {FORM} hf"
        raise InputError(f"{quantize} is for {FORM} hf", QUANTIZE, hint)
    number = int(group) if group is not None and group.isdecimal() else group
    document = {"weights": quantize, "group": number, "activations": activations or "none"}
    try:
        return QuantizeSpec.model_validate(document).scheme
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{first['loc'][0]}" if first["loc"] else QUANTIZE
        raise InputError(str(first["msg"]).removeprefix("Value error, "), where) from None


def with_scheme(asked: Conversion, quantize: QuantizeSpec | None, where: str = FORM) -> Conversion:
    """Return what is asked for with the quantisation that the job trains for, unless the command names another.

    Raises InputError if the format cannot store it.
    """
    if asked.scheme is not None or quantize is None:
        return replace(asked, scheme=None) if asked.scheme == FULL else asked
    scheme = quantize.scheme
    wanted = "gguf" if scheme.is_of_gguf else "hf"
    if asked.form != wanted:
        full = f"add {QUANTIZE} none for weights in full precision" if where == FORM else "set it to null"
        raise InputError(
            f"quantize trains weights for {scheme.weights}, which {asked.form} does not store",
            where,
            f"give {wanted}, or {full}",
        )
    return replace(asked, scheme=scheme, numbers=quantize.weights if scheme.is_of_gguf else asked.numbers)  # type: ignore[arg-type]


def check_quantised(asked: Conversion, workload: Workload) -> None:
    """Raise InputError or WorkloadError if the weights cannot be quantised for the format, judging by their names."""
    if asked.scheme is None or asked.scheme == FULL:
        return
    if asked.form == "hf":
        check_extra(EXTRAS["quantize"], "quantize", QUANTIZE)
    hf_names(asked.scheme, workload)


def hf_names(scheme: Scheme, workload: Workload) -> list[str]:
    """Return transformers' names of the weights that a scheme quantises. Raises WorkloadError if there are none."""
    import torch

    from workloads.model.fake_quantise import check_scheme, quantised_layers

    with torch.device("meta"):
        model = workload.build()
    blocks = workload.blocks(model)
    check_scheme(model, blocks, scheme)
    found = workload.hf_weights([*quantised_layers(model, blocks, scheme)])
    if not found:
        raise WorkloadError("transformers stores none of the quantised weights as a matrix")
    return sorted(found)


def facts_of(asked: Conversion, is_trained: bool, kept: list[str]) -> dict[str, Any]:
    """Return what export.json says: the format, whether the run trained for it, what stays in full precision, and the
    versions of the libraries that wrote it.
    """
    packages = {
        "hf": ("compressed-tensors", "transformers"),
        "gguf": ("gguf",),
        "onnx": ("onnx", "onnxruntime"),
    }
    facts: dict[str, Any] = {"weights": asked.numbers, "trained": is_trained}
    if isinstance(asked.scheme, Scheme):
        scheme = asked.scheme
        facts["weights"] = scheme.weights
        facts["group"] = scheme.group or "row"
        facts["activations"] = "dynamic" if scheme.activations else "none"
        facts |= {"match": list(scheme.match), "keep": list(scheme.keep)}
    named = (*packages[asked.form], "torch")
    return {
        "quantized": facts | {"kept": kept},
        "versions": {name: metadata.version(name) for name in named},
    }


def calibration(tokens: Tokens, workload: Workload) -> Iterator[Batch]:
    """Yield batches of training samples, spread evenly over the data, one at a time."""
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.samples.windows import windows_of

    objective = workload.objective
    windows = [windows_of(tokens, source, objective.reading) for source in range(tokens.sources)]
    read = SampleReader(tokens, windows, objective)
    count = min(CALIBRATED, len(read))
    ids = [number * len(read) // count for number in range(count)]
    for start in range(0, count, AT_ONCE):
        yield read.collate(ids[start : start + AT_ONCE], 0)


def kept_in(asked: Conversion, folder: str) -> list[str]:
    """Return the matrices of an export that keep more bits than the others, by their names in it."""
    if asked.numbers in ("q8_0", "q4_0"):
        from workloads.hf.gguf_export import kept_in_file

        return kept_in_file(folder, asked.numbers)
    if asked.numbers in ("int8", "int8_static"):
        from workloads.hf.onnx_quantised import kept_in_model

        return kept_in_model(folder)
    return []


@dataclass(frozen=True)
class Written:
    """A converted export.

    Attributes:
        difference: of a quantised model, the largest difference of its outputs in transformers to ours with fake
            quantisation.
        rounding: the largest change of outputs by rounded numbers, as a share of the largest.
        facts: what export.json says of it.
    """

    difference: float | None
    rounding: float | None
    facts: dict[str, Any]


def resolved_form(form: Any, checkpoint: CheckpointSpec, quantize: QuantizeSpec | None) -> Any:
    """Return what to export: the form that is asked for, else the job's, with the quantisation that the job trains for.

    Raises InputError if they do not fit.
    """
    found = form or form_of(checkpoint)
    if found is None and quantize and quantize.scheme.is_of_gguf:
        found = Conversion("gguf")
    elif found in (None, "hf") and quantize:
        found = Conversion("hf")
    if not isinstance(found, Conversion):
        return found or "hf"
    found = with_scheme(found, quantize)
    return "hf" if found.form == "hf" and found.scheme is None else found


def write_converted(
    found: CommitModel, form: Conversion, plain: str, folder: str, tried: Iterable[Batch]
) -> Written:
    """Write the export in `plain` to `folder` in another format, and check it.

    Args:
        found: the commit.
        form: the format.
        plain: its export for transformers.
        folder: where to write.
        tried: batches on which outputs are compared.

    Raises InputError if the format does not support the model, RuntimeError if the result is wrong.
    """
    is_trained = found.spec.quantize is not None
    if form.form == "hf":
        difference, change, kept = _write_quantised(found, form.scheme, plain, folder, tried)
        return Written(difference, change, facts_of(form, is_trained, kept))
    with wrong_input(FORM):
        chosen = hf_names(form.scheme, found.workload) if isinstance(form.scheme, Scheme) else None
    rounding = convert(form, plain, folder, chosen, calibration(found.tokens, found.workload))
    facts = facts_of(form, is_trained, kept_in(form, folder)) if form.numbers in ROUNDED else {}
    return Written(None, rounding, facts)


def _write_quantised(
    found: CommitModel, scheme: Any, plain: str, folder: str, tried: Iterable[Batch]
) -> tuple[float, float, list[str]]:
    """Write the export in `plain` to `folder` with quantised weights.

    Returns the largest difference of its outputs in transformers to those of our model with fake quantisation, the
    effect of rounding on them, and the linear layers that stay in full precision. Raises RuntimeError if transformers
    cannot load it, or the outputs differ.
    """
    from workloads.hf.compare import TOLERANCE, difference
    from workloads.hf.compressed_export import export_compressed
    from workloads.load import with_weights

    check_extra(EXTRAS["quantize"], "quantize", QUANTIZE)
    workload = found.workload
    with wrong_input(QUANTIZE):
        kept = export_compressed(plain, folder, scheme, hf_names(scheme, workload))
    batches = [*tried]
    apart = []
    for each in (scheme, None):
        model = with_weights(workload, found.read, scheme=each)
        try:
            # In fp64, since rounding of activations is a step, and sums in another order lie on its other side.
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of compressed-tensors
                apart.append(difference(workload.config, model, folder, batches, in_fp64=True))
        except AttributeError as error:  # of classes whose initialisation reads weights that are not there
            raise RuntimeError(
                f"transformers cannot load this class in this form ({error}); nothing was published"
            ) from error
    if not apart[0] <= TOLERANCE:
        raise RuntimeError(
            f"the quantised model's outputs differ by {apart[0]:.2e} in transformers; nothing was published"
        )
    return apart[0], apart[1], kept

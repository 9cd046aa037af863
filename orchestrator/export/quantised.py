"""Exports in another form, and with quantised weights: which scheme is asked for, and what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.export.converted import DCP, FORM, Conversion, check_packages, form_of
from orchestrator.export.kinds import QUANTISED, ExportForm, Plain, Written, form_named, with_numbers
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
        hint = "name the format by --numbers" if form in with_numbers() else f"add {FORM} hf"
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
    return replace(asked, scheme=scheme, numbers=quantize.weights if scheme.is_of_gguf else asked.numbers)


def check_quantised(asked: Conversion, workload: Workload) -> None:
    """Raise InputError or WorkloadError if the weights cannot be quantised for the format, judging by their names."""
    if asked.scheme is None or asked.scheme == FULL:
        return
    if asked.form == "hf":
        check_packages(form_named(QUANTISED), QUANTIZE)
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


def facts_of(
    form: ExportForm, numbers: str, scheme: Scheme | None, is_trained: bool, kept: Collection[str]
) -> dict[str, Any]:
    """Return what export.json says of rounded weights.

    Args:
        form: the form that has them.
        numbers: the format of matrices, unless a scheme names it.
        scheme: how linear layers are quantised; None if the form rounds all matrices by itself.
        is_trained: whether the run trained for it.
        kept: what stays in full precision.
    """
    facts: dict[str, Any] = {"weights": numbers, "trained": is_trained}
    if scheme is not None:
        facts["weights"] = scheme.weights
        facts["group"] = scheme.group or "row"
        facts["activations"] = "dynamic" if scheme.activations else "none"
        facts |= {"match": list(scheme.match), "keep": list(scheme.keep)}
    return {
        "quantized": facts | {"kept": list(kept)},
        "versions": {name: metadata.version(name) for name in (*form.packages, "torch")},
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
    found: CommitModel, asked: Conversion, plain: str, folder: str, tried: Iterable[Batch]
) -> tuple[Written, dict[str, Any]]:
    """Write the export in `plain` to `folder` in another form, and check it.

    Args:
        found: the commit.
        asked: the form.
        plain: its export for transformers.
        folder: where to write.
        tried: batches on which outputs are compared.

    Returns what was written, and what export.json says of its rounded weights. Raises InputError if the form does not
    support the model, RuntimeError if the result is wrong.
    """
    if asked.form == DCP:
        from workloads.hf.export.dcp_export import export_dcp

        with wrong_input(FORM):
            export_dcp(plain, folder, asked.names)
        return Written(), {}
    where = QUANTIZE if asked.form == "hf" else FORM
    form = form_named(QUANTISED if asked.form == "hf" else asked.form)
    check_packages(form, where)
    scheme = asked.scheme if isinstance(asked.scheme, Scheme) else None
    numbers = asked.numbers or form.usual
    with wrong_input(where):
        chosen = hf_names(scheme, found.workload) if scheme else None
        written = form.write(
            Plain(
                folder=plain,
                target=folder,
                numbers=numbers,
                scheme=scheme,
                chosen=chosen,
                samples=calibration(found.tokens, found.workload),
                difference=partial(_difference, found, folder, [*tried]),
            )
        )
    if not (scheme or numbers in form.rounded):
        return written, {}
    is_trained = found.spec.quantize is not None
    return written, facts_of(form, numbers, scheme, is_trained=is_trained, kept=written.kept)


def _difference(found: CommitModel, folder: str, batches: list[Batch], scheme: Scheme | None) -> float:
    """Return the largest difference of an export's outputs in transformers to those of our model with a scheme.

    In fp64, since rounding of activations is a step, and sums in another order lie on its other side.
    """
    from workloads.hf.check.compare import difference
    from workloads.inference import with_weights

    model = with_weights(found.workload, found.read, scheme=scheme)
    return difference(found.workload.config, model, folder, batches, in_fp64=True)

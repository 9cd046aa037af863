"""Exports in another form, and with quantised weights: which scheme is asked for, and what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED, REWARDED
from orchestrator.export.converted import (
    DCP,
    FORM,
    MAX_BYTES,
    MEAN_BITS,
    NUMBERS,
    Conversion,
    check_packages,
    form_of,
)
from orchestrator.export.kinds import QUANTISED, ExportForm, Plain, Written, form_named, with_numbers
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.resolved_job import wrong_input
from workloads.errors import WorkloadError
from workloads.model.scheme import Scheme

if TYPE_CHECKING:
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.resolve.commit_model import CommitModel
    from workloads.workload import Batch, Workload

QUANTIZE = "--quantize"
FULL: Literal["none"] = "none"
"""The value of the option for an export in full precision."""
CALIBRATED = 128
"""Training samples over which ranges of activations are measured."""
BITS = "bits.md"
"""The file of an export with mixed bits that has the bits of each weight, and why."""
AT_ONCE = 8
"""Samples of a batch of these. Only its minima and maxima are kept."""


def scheme_option(
    form: str | None, quantize: str | None, group: str | None, activations: str | None
) -> Scheme | Literal["none"] | None:
    """Return the quantisation that the options of a command name; None for that of the job.

    Args:
        form: the form of the export; None for that of the job.
        quantize: int8, int4 or none.
        group: number of weights that share a scale, or row.
        activations: none or dynamic.

    Raises:
        InputError: the options do not fit together.
    """
    if quantize is None:
        for option, value in (("--group", group), ("--activations", activations)):
            if value is not None:
                raise InputError(
                    f"is for {QUANTIZE}", option, f"add {QUANTIZE} int8 or int4, or leave it out"
                )
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


def with_scheme(conversion: Conversion, quantize: QuantizeSpec | None, where: str = FORM) -> Conversion:
    """Return a form with the quantisation that the job trains for, unless the command names another.

    Args:
        conversion: the form and its options.
        quantize: the key `quantize` of the job; None without one.
        where: the option or key that names the form, for messages.

    Raises:
        InputError: the form cannot store the quantised weights.
    """
    if conversion.scheme is not None or quantize is None:
        return replace(conversion, scheme=None) if conversion.scheme == FULL else conversion
    scheme = quantize.scheme
    full = f"add {QUANTIZE} none for weights in full precision" if where == FORM else "set it to null"
    if not _stores(conversion.form, scheme):
        wanted = "gguf" if scheme.is_of_gguf else "hf"
        group = "" if scheme.is_of_gguf else f" with a scale for each {scheme.group or 'row'}"
        raise InputError(
            f"quantize trains weights for {scheme.weights}{group}, which {conversion.form} does not store",
            where,
            f"give {wanted}, or {full}",
        )
    if not scheme.is_of_gguf and conversion.numbers is not None and conversion.form != "hf":
        raise InputError(
            f"{conversion.form} stores the integers that quantize trains for, so {conversion.numbers} has no effect",
            where,
            f"leave {NUMBERS if where == FORM else 'checkpoint.export_numbers'} out, or {full}",
        )
    return replace(
        conversion, scheme=scheme, numbers=quantize.weights if scheme.is_of_gguf else conversion.numbers
    )


def _stores(form: str, scheme: Scheme) -> bool:
    if form == "hf":
        return not scheme.is_of_gguf
    return form != DCP and form_named(form).stores(scheme)


def check_quantised(conversion: Conversion, workload: Workload) -> None:
    """Raise InputError or WorkloadError if the weights cannot be quantised for the format, judging by their names."""
    if conversion.scheme is None or conversion.scheme == FULL:
        return
    form = form_named(QUANTISED if conversion.form == "hf" else conversion.form)
    if conversion.form == "hf":
        check_packages(form, QUANTIZE)
    chosen = schemes_by_name(conversion.scheme, hf_weights(conversion.scheme, workload))
    form.check_quantised(workload.hf_config(), chosen)


def hf_weights(scheme: Scheme, workload: Workload) -> Mapping[str, Sequence[str]]:
    """Return transformers' names of the weights that a scheme quantises, with our weights of each.

    Args:
        scheme: the quantisation.
        workload: the model.

    Raises:
        WorkloadError: there are no such weights.
    """
    import torch

    from workloads.model.fake_quantise import check_scheme, quantised_layers

    with torch.device("meta"):
        model = workload.build()
    blocks = workload.blocks(model)
    check_scheme(model, blocks, scheme)
    result = workload.hf_weights([*quantised_layers(model, blocks, scheme)])
    if not result:
        raise WorkloadError("transformers stores none of the quantised weights as a matrix")
    return result


def schemes_by_name(scheme: Scheme, weights: Mapping[str, Sequence[str]]) -> dict[str, Scheme]:
    """Return how each matrix of transformers is rounded, by its name.

    Args:
        scheme: the quantisation.
        weights: the matrices, as `hf_weights` returned them.

    Raises:
        WorkloadError: a matrix would have weights in two formats.
    """
    result = {}
    for name, ours in sorted(weights.items()):
        result[name], *others = {scheme.of(each) for each in ours}
        if others:
            raise WorkloadError(
                f"transformers joins weights of 4 and of 8 bits in {name} ({', '.join(ours)}); give all of them the "
                "same in int8"
            )
    return result


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
        if scheme.int8:
            facts["int8"] = list(scheme.int8)
    return {
        "quantized": facts | {"kept": list(kept)},
        "versions": {name: metadata.version(name) for name in (*form.packages, "torch")},
    }


def calibration(tokens: Tokens, workload: Workload) -> Iterator[Batch]:
    """Yield batches of training samples, spread evenly over the data, one at a time."""
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.samples.windows import windows_of

    objective = workload.objective
    windows = [windows_of(tokens, source, objective.windowing) for source in range(tokens.sources)]
    return _spread(SampleReader(tokens, windows, objective))


def _spread(read: SampleReader) -> Iterator[Batch]:
    """Yield batches of CALIBRATED samples, spread evenly over all."""
    count = min(CALIBRATED, len(read))
    ids = [number * len(read) // count for number in range(count)]
    for start in range(0, count, AT_ONCE):
        yield read.collate(ids[start : start + AT_ONCE], 0)


def resolved_form(form: Any, checkpoint: CheckpointSpec, quantize: QuantizeSpec | None) -> Any:
    """Return what to export, with the quantisation that the job trains for.

    Args:
        form: the form that a command asks for; None for that of the job.
        checkpoint: the key `checkpoint` of the job.
        quantize: its key `quantize`; None without one.

    Raises:
        InputError: form and quantisation do not fit together.
    """
    result = form or form_of(checkpoint)
    if result is None and quantize and quantize.scheme.is_of_gguf:
        result = Conversion("gguf")
    elif result in (None, "hf") and quantize:
        result = Conversion("hf")
    if not isinstance(result, Conversion):
        return result or "hf"
    result = with_scheme(result, quantize)
    return "hf" if result.form == "hf" and result.scheme is None else result


def write_converted(
    model: CommitModel, conversion: Conversion, plain: str, folder: str, tried: Iterable[Batch]
) -> tuple[Written, dict[str, Any]]:
    """Write the export in `plain` to `folder` in another form, and check it.

    Args:
        model: the commit.
        conversion: the form.
        plain: its export for transformers.
        folder: where to write.
        tried: batches on which outputs are compared.

    Returns what was written, and what export.json says of its rounded weights. Raises InputError if the form does not
    support the model, RuntimeError if the result is wrong.
    """
    if conversion.form == DCP:
        from workloads.hf.export.dcp_export import export_dcp

        with wrong_input(FORM):
            export_dcp(plain, folder, conversion.names)
        return Written(), {}
    where = QUANTIZE if conversion.form == "hf" else FORM
    form = form_named(QUANTISED if conversion.form == "hf" else conversion.form)
    check_packages(form, where)
    scheme = conversion.scheme if isinstance(conversion.scheme, Scheme) else None
    numbers = conversion.numbers or form.usual
    mixed: dict[str, Any] = {}
    with wrong_input(where):
        chosen = None
        if scheme:
            names = hf_weights(scheme, model.workload)
            if conversion.mean_bits is not None or conversion.max_bytes is not None:
                scheme, mixed = _mixed(model, conversion, names, plain, folder)
            chosen = schemes_by_name(scheme, names)
        written = form.write(
            Plain(
                folder=plain,
                target=folder,
                numbers=numbers,
                scheme=scheme,
                chosen=chosen,
                samples=calibration(model.tokens, model.workload),
                difference=partial(_difference, model, folder, [*tried]),
            )
        )
    if not (scheme or numbers in form.rounded):
        return written, {}
    if conversion.max_bytes is not None:
        mixed["bytes"] = sum(_tensor_bytes(folder).values())
        if mixed["bytes"] > conversion.max_bytes:  # rows that are no multiple of 8 are filled up
            problem = (
                f"the export has {mixed['bytes']:,} bytes, because its rows are filled up to multiples of 8"
            )
            raise InputError(problem, f"{MAX_BYTES} {conversion.max_bytes}", "give a smaller number")
    is_trained = model.spec.quantize is not None
    facts = facts_of(form, numbers, scheme, is_trained=is_trained, kept=written.kept)
    facts["quantized"] |= mixed
    return written, facts


def bytes_in_int4(plain: str, names: Collection[str], scheme: Scheme) -> int:
    """Return the bytes of all tensors of the export in `plain` once the weights `names` are rounded to int4."""
    from workloads.hf.files.weight_files import Weights

    weights = Weights(plain)
    shapes = {name: weights.shape(name) for name in names}
    full = sum(size for name, size in _tensor_bytes(plain).items() if name not in shapes)
    return full + sum(scheme.bytes_of(*shape) for shape in shapes.values())


def _tensor_bytes(folder: str) -> dict[str, int]:
    """Return the bytes of each tensor in the safetensors files of a folder, by its name there."""
    from safetensors import safe_open

    result: dict[str, int] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            result |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return result


def _mixed(
    model: CommitModel, conversion: Conversion, names: Mapping[str, Sequence[str]], plain: str, folder: str
) -> tuple[Scheme, dict[str, Any]]:
    """Return a scheme with int8 for the weights that lose most in int4, and what export.json says of it.

    Writes the plan to BITS. Measures on held-out text if the run has a share of it, else on training samples. Raises
    InputError if the export has more bytes than wanted with all weights in int4.
    """
    from orchestrator.data.samples.held_out_set import split_set
    from orchestrator.data.samples.held_out_split import split
    from orchestrator.quantize import mixed_bits

    scheme, max_bytes = conversion.scheme, conversion.max_bytes
    option = MEAN_BITS if max_bytes is None else MAX_BYTES
    assert isinstance(scheme, Scheme)
    if (objective := model.spec.workload.objective) in (*REFERENCED, *REWARDED):
        raise WorkloadError(
            f"{option} measures the loss, and that of {objective} needs a reference or answers; leave it out"
        )
    spare = 0
    if max_bytes is not None and (spare := max_bytes - (least := bytes_in_int4(plain, names, scheme))) < 0:
        hint = f"give at least {least}"
        raise InputError(f"the export has {least:,} bytes with all in int4", f"{option} {max_bytes}", hint)
    held_out = model.spec.data.validation and model.spec.data.validation.share
    workload, tokens = model.workload, model.tokens
    if held_out:
        batches = _spread(split_set(split(tokens, held_out), workload.objective).read)
    else:
        batches = calibration(tokens, workload)
    samples = "held-out samples" if held_out else "training samples"
    together = dict.fromkeys(map(tuple, names.values()))
    exact, measured = mixed_bits.measure(workload, model.read, scheme, together, [*batches])
    room = mixed_bits.room_by_bytes(spare)
    if conversion.mean_bits is not None:
        room = mixed_bits.room_by_mean(measured, conversion.mean_bits)
    int8 = mixed_bits.chosen_for_int8(measured, room)
    Path(folder, BITS).write_text(mixed_bits.table(exact, measured, int8, samples))
    facts = {"mean_bits": round(mixed_bits.mean_bits_of(measured, int8), 4), "measured_on": samples}
    return replace(scheme, int8=tuple(int8)), facts


def _difference(commit_model: CommitModel, folder: str, batches: list[Batch], scheme: Scheme | None) -> float:
    """Return the largest difference of an export's outputs in transformers to those of our model with a scheme.

    In fp64, since rounding of activations is a step, and sums in another order lie on its other side.
    """
    from workloads.hf.check.compare import difference
    from workloads.inference import with_weights

    model = with_weights(commit_model.workload, commit_model.read, scheme=scheme)
    return difference(commit_model.workload.config, model, folder, batches, in_fp64=True)

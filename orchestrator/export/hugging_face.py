"""Export a commit to a folder that transformers loads (weights, config, tokenizer), and compare the outputs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.auto_tokenizer import FILE, class_to_read
from orchestrator.export.converted import FORM, Conversion
from orchestrator.export.evaluation_facts import evaluation_facts
from orchestrator.export.peft_adapter import check_adapter_export, write_adapter
from orchestrator.export.quantised import resolved_form, write_converted
from orchestrator.export.target import MARK, check_target, draft, publish
from orchestrator.export.tokenizer import write_tokenizer
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.retry import patient
from workloads.own.object_reference import is_object_reference

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.data.store.tokens import Tokens
    from orchestrator.evaluate.config import EvaluateSpec
    from workloads.own.model import OwnWorkload
    from workloads.transformer_workload import TransformerWorkload
    from workloads.workload import Batch, Objective, Workload

Form: TypeAlias = Literal["hf", "adapter", "safetensors"]
COMPARED, SHORT = 64, 7
"""Tokens of the longest and of the shortest sequence on which outputs are compared."""
SAMPLE_TOKENS = 120


def export(
    run_uri: str,
    step: int,
    target: str,
    best: bool = False,
    raw: bool = False,
    form: Form | Conversion | None = None,
) -> dict[str, Any]:
    """Export a commit of a run to the folder `target`: complete and checked, or not at all.

    The commit is pinned meanwhile, so that an active run does not remove it, if the run directory is writable.
    Formats other than transformers' are made from an export for transformers, which needs the space of both.

    Args:
        run_uri: the run directory.
        step: the commit's step; None for the last.
        target: the folder.
        best: take the best commit by the metric of checkpoint.keep_best, if there is one.
        raw: do not average the weights, even if the job has an average.
        form: the format; None for the job's. An own model has a separate format.

    Returns {"uri", "step", "logits_difference", "sample"} and the facts of `average_fields` about the weights. The
    difference is None without anything to compare with; `sample` is generated text, None if the model generates none.
    "quantized" and "versions" describe a quantised export, see `orchestrator.export.quantised`.
    "rounding" is the effect of rounded numbers on its outputs, if the format has such. "tokenizer_class" is the class
    that reads the tokenizer if AutoTokenizer does not.

    Raises InputError if the commit is missing, and RuntimeError if transformers disagrees.
    """
    from orchestrator.checkpoint.evaluations import metrics_of
    from orchestrator.checkpoint.pins import holding
    from orchestrator.export.model_card import NAME, model_card
    from orchestrator.models.averaged import average_fields
    from orchestrator.resolve.commit_model import model_of_run

    check_target(target)
    loaded = model_of_run(run_uri, step, best, raw)
    spec = loaded.spec
    tokens = loaded.tokens
    commit = loaded.commit
    weights = average_fields(loaded.reader)
    step = commit.step
    is_own = is_object_reference(spec.workload.model)
    write_plain = partial(
        write, tokens, spec=spec.workload, data=spec.data, seed=spec.seed, own_code=spec.own_code
    )
    rounded = None
    quantised: dict[str, Any] = {}
    if is_own and (isinstance(form, Conversion) or form == "adapter"):
        hint = "use hf, with its code for transformers, or leave it out"
        raise InputError("an own model is exported whole, as hf or safetensors", FORM, hint)
    if form == "safetensors" and not is_own:
        raise InputError(
            "safetensors is for own models", FORM, "use hf, whose weights are in that format too"
        )
    if is_own and spec.quantize:
        raise InputError("an own model is exported in full precision, and it trains for another", FORM)
    with holding(loaded.store, step, f"the export to {target}"), draft(target) as folder:
        if is_own:
            form = _form_of_own(loaded.workload, form or spec.checkpoint.export)
        else:
            form = resolved_form(form, spec.checkpoint, spec.quantize)
        if isinstance(form, Conversion):
            with tempfile.TemporaryDirectory(prefix="hf-", dir=folder) as plain:
                difference = write_plain(loaded.workload, loaded.read, plain)
                tried = batches(spec.data, tokens, loaded.workload)
                written, quantised = write_converted(loaded, form, plain, folder, tried)
            difference = difference if written.difference is None else written.difference
            rounded = written.rounding
        else:
            difference = write_plain(loaded.workload, loaded.read, folder, form)
        facts = {"step": step, "receipt": commit.receipt, "run": spec.name, "logits_difference": difference}
        if not is_own or (form == "hf" and spec.data.samples is None):
            facts["evaluation"] = evaluation_facts(
                data=spec.data,
                job=spec.workload,
                train=spec.train,
                seed=spec.seed,
                tokens=tokens,
                commit=commit,
                trained=loaded.workload,
            )
        facts |= weights | ({} if rounded is None else {"rounding": rounded}) | quantised
        is_text = form == "hf" and not is_own
        sample = _sample(spec.evaluate, tokens, loaded.workload, folder) if is_text else None
        evaluation = metrics_of(loaded.store, commit)
        named = form.form if isinstance(form, Conversion) else form
        reader = class_to_read(folder) if Path(folder, FILE).exists() and not is_own else ""
        if reader:
            facts["tokenizer_class"] = reader
        (Path(folder) / NAME).write_text(
            model_card(
                loaded,
                named,
                evaluation=evaluation,
                weights=weights,
                difference=difference,
                reader=reader,
                quantised=quantised.get("quantized"),
            )
        )
        facts["files"] = [*sorted(os.listdir(folder)), MARK]
        (Path(folder) / MARK).write_text(json.dumps(facts, indent=2) + "\n")
        publish(folder, target, patient(spec.limits.unsaved))
    export_facts = {"uri": target, "step": step, **weights, "logits_difference": difference, "sample": sample}
    if reader:
        export_facts["tokenizer_class"] = reader
    return (export_facts if rounded is None else export_facts | {"rounding": rounded}) | quantised


def _form_of_own(workload: Workload, requested: Any) -> Form:
    """Return hf if the user requests it or transformers has the model's class; else safetensors."""
    from workloads.own.declared import is_of_hf

    return "hf" if requested == "hf" or is_of_hf(cast("OwnWorkload", workload).config.bare) else "safetensors"


def write(
    tokens: Tokens,
    workload: Workload,
    read: Callable[[str], Tensor],
    folder: str,
    form: Form = "hf",
    *,
    spec: WorkloadSpec,
    data: DataSpec,
    seed: int,
    own_code: Mapping[str, str],
) -> float | None:
    """Write model and tokenizer to a folder.

    Args:
        tokens: the prepared data, with the tokenizer.
        workload: the model and its objective.
        read: returns a tensor of the commit by its name.
        folder: a local folder.
        form: the form of the export.
        spec: the model as the job names it.
        data: the data as the job names it.
        seed: the seed of the run.
        own_code: the user's own code, see `JobSpec.own_code`.

    Returns:
        The largest difference to the outputs of transformers; None for an own model that transformers lacks.

    Raises:
        RuntimeError: the difference is too large.
    """
    if is_object_reference(spec.model):
        from orchestrator.export.own_model import write_own

        return write_own(
            data=data,
            seed=seed,
            own_code=own_code,
            tokens=tokens,
            workload=cast("OwnWorkload", workload),
            read=read,
            folder=folder,
            form=form,
        )
    if form == "adapter":
        with wrong_input("checkpoint.export"):
            check_adapter_export(workload)
        write_tokenizer(tokens, workload, data, folder)
        tried = batches(data, tokens, workload)
        return write_adapter(spec, cast("TransformerWorkload", workload), read, folder, tried)
    with wrong_input("checkpoint.export"):
        workload.to_hf(read, folder)
    write_tokenizer(tokens, workload, data, folder)
    return _compare(data, tokens, workload, read, folder)


def _compare(
    data: DataSpec, tokens: Tokens, workload: Workload, read: Callable[[str], Tensor], folder: str
) -> float:
    """Return the largest difference between the outputs of our model and of the exported one
    (`workloads.hf.check.compare`).
    """
    from workloads.hf.check.compare import TOLERANCE, difference
    from workloads.inference import with_weights

    model = with_weights(workload, read)
    result = difference(workload.config, model, folder, batches(data, tokens, workload))
    if not result <= TOLERANCE:
        raise RuntimeError(f"the exported model's outputs differ by {result:.2e}; nothing was published")
    return result


def batches(data: DataSpec, tokens: Tokens, workload: Workload) -> Iterator[Batch]:
    """Return the batches for comparing both models: one of the objective, and text of several lengths, also padded."""
    import torch

    from workloads.errors import WorkloadError
    from workloads.hf.check.compare import probes
    from workloads.objectives.samples import Samples

    length = min(data.sequence_length, COMPARED)
    objective = workload.objective
    with contextlib.suppress(WorkloadError):  # some objectives need their full length
        objective = replace(objective, sequence_length=length)  # type: ignore[type-var]
    if tokens.manifest.records:
        yield from _record_batches(tokens, objective, workload)
        return
    window = objective.window(objective.sequence_length)  # type: ignore[attr-defined]
    source = max(range(tokens.sources), key=tokens.length)
    text = tokens.window(source, 0, min(4 * max(window, length), tokens.length(source)))
    read = Samples(lambda i: np.resize(np.roll(text, -i * window), window), 2)
    yield objective.collate(read, [0, 1], 0)
    lengths = (length, length // 2 + 1, SHORT)
    yield from probes(workload.config, workload.vocabulary, torch.from_numpy(text), lengths)


def _record_batches(tokens: Tokens, objective: Objective, workload: Workload) -> Iterator[Batch]:
    """Return the first records as the objective reads them, and their texts at several lengths."""
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.samples.windows import windows_of
    from workloads.hf.check.compare import probes

    windows = [windows_of(tokens, source, objective.windowing) for source in range(tokens.sources)]
    read = SampleReader(tokens, windows, objective)
    largest = max(range(tokens.sources), key=tokens.length)
    first = sum(len(window) for window in windows[:largest])
    batch = read.collate(range(first, first + min(4, len(windows[largest]))), 0)
    # A row has two answers, or texts that are compared, which transformers reads one by one.
    parts = 2 if getattr(objective, "compares", False) else getattr(objective, "parts", 1)
    if parts > 1:
        part_length = batch["tokens"].shape[1] // parts
        batch = {name: batch[name].view(-1, part_length) for name in ("tokens", "padding")}
    yield batch
    text = batch["tokens"][batch["padding"]]  # padding in between would be mistaken for the end of a row
    length = min(COMPARED, len(text) // 2)
    yield from probes(workload.config, workload.vocabulary, text, (length, length // 2 + 1, SHORT))


def _sample(evaluate: EvaluateSpec | None, tokens: Tokens, workload: Workload, folder: str) -> str | None:
    """Return text generated by the exported model, after the first prompt of the job's samples at their temperature,
    else after the first tokens of the corpus; None if it generates none.
    """
    import torch

    from orchestrator.resolve.prompts import framed
    from workloads.hf.check.compare import load

    if tokens.manifest.records:
        return None
    model = load(folder, strict=False)
    samples = evaluate and evaluate.samples
    text = tokens.tokenizer()
    temperature = samples.temperature if samples else 0.8
    if samples:
        prompt = torch.tensor([framed(workload, text, samples.prompts[0])])
    else:
        source = max(range(tokens.sources), key=tokens.length)
        prompt = torch.from_numpy(tokens.window(source, 0, min(8, tokens.length(source))))[None]
    room = getattr(model.config, "max_position_embeddings", 512) - prompt.shape[1]
    if not model.can_generate() or model.config.is_encoder_decoder or room < 1:
        return None
    torch.manual_seed(0)
    try:
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(SAMPLE_TOKENS, room),
            do_sample=temperature > 0,
            **({"temperature": temperature, "top_k": 50} if temperature else {}),
            pad_token_id=tokens.manifest.roles["eos"],
        )
    except (
        RuntimeError,
        ValueError,
    ):  # an untrained or diverged model may have probabilities that cannot be sampled
        return None
    return text.decode(made[0].tolist())

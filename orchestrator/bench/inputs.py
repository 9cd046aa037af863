"""The held-out samples on which exports are measured, as arrays in a file that each export's process reads.

Every export reads the same rows through its own tokenizer. Its runtime is fed what it is fed in production: tokens,
the mask of padding, and token types where the model has them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from orchestrator.bench.export_folder import ExportFolder
from orchestrator.config.errors import InputError
from orchestrator.config.paths import resolve_paths
from orchestrator.data.samples.held_out_set import HeldOut, set_of
from orchestrator.data.sources.check import check_sources
from orchestrator.data.store.tokens import Tokens
from orchestrator.evaluate.of_export import format_of_export, spec_of_export, workload_of_export
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from workloads.objectives.sampled import IGNORE

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec

Prepare: TypeAlias = "Callable[[JobSpec, RunDir, PreparedData], PreparedData]"
"""Prepares the missing data of a job, given its run directory and the data prepared before."""
SET = "held_out"
"""The name of the held-out set in the job that prepares it."""
TOKENS = "tokens"
MASK = "mask"
TYPES = "token_types"
CLASSES = "classes"
LABELS = "labels"
"""Names of the arrays: int64 tokens [samples, length], bool mask [samples, length] of what is not padding, int64
token_types [samples, length], and either int64 classes [samples] or int64 labels [samples, length]."""
BITS = "bits_per_byte"
OF_CLASSES = ("sequence_classification",)
OF_TOKENS = ("causal_lm", "conversation", "masked_lm", "token_classification")
"""The objectives whose exports are measured: a class for a sample, or a label for a token."""
READ = {"tokens", "labels", "sequence_labels", "padding", "token_types", "segments", "positions"}
"""Entries of a batch that an export's own runtime reads or does not need."""


@dataclass(frozen=True)
class Inputs:
    """The held-out samples of an export.

    Attributes:
        arrays: see TOKENS and the names after it.
        objective: what the export was trained with.
        labels: names of the classes; empty for a language model.
        tokens_per_byte: tokens of the text per byte of it, as `evaluate` counts them; 0 where samples are records, or
            some are left out.
    """

    arrays: Mapping[str, np.ndarray]
    objective: str
    labels: tuple[str, ...]
    tokens_per_byte: float

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.arrays[TOKENS])

    @property
    def predicts_classes(self) -> bool:
        """Whether each sample has one class."""
        return CLASSES in self.arrays

    @property
    def predicted(self) -> int:
        """Number of predicted classes or tokens."""
        return self.samples if self.predicts_classes else int((self.arrays[LABELS] != IGNORE).sum())

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics computed from them, the most informative first."""
        result = metrics_of(self.objective)
        return tuple(name for name in result if name != BITS or self.tokens_per_byte)

    def write(self, path: Path) -> None:
        """Write the arrays to a file."""
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}, path)


def read_inputs(
    exports: Sequence[ExportFolder],
    uri: str,
    overrides: Sequence[str],
    max_samples: int,
    prepare: Prepare,
) -> list[Inputs]:
    """Return at most `max_samples` samples of the rows at `uri` for each export, the same rows for all.

    `overrides` of the job that reads them have the form a.b=c. Raises InputError if an export cannot read them.
    """
    result = []
    for export in exports:
        spec = _spec(export, uri, overrides)
        objective = workload_of_export(spec, needs_weights=False).objective
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            before = PreparedData(format=format_of_export(export.path))
            data = prepare(spec, RunDir(f"{folder}/run"), before)
            held = set_of(Tokens.open(data.sets[SET]), objective, SET)
            arrays = _arrays(held, min(held.samples, max_samples), export)
        is_stream = objective.name == "causal_lm" and held.samples <= max_samples
        labels = tuple(spec.data.labels)
        per_byte = held.tokens / max(held.bytes, 1) if is_stream else 0.0
        result.append(Inputs(arrays, objective.name, labels, tokens_per_byte=per_byte))
    return result


def metrics_of(objective: str) -> tuple[str, ...]:
    """Return the metrics to measure for exports of an objective, the most informative first; none of another."""
    if objective in OF_CLASSES:
        return "accuracy", "f1", "loss"
    return ("perplexity", "loss", "accuracy", BITS) if objective in OF_TOKENS else ()


def comparable_metric(
    exports: Sequence[ExportFolder], inputs: Sequence[Inputs], requested: str | None, where: str
) -> str:
    """Return the metric by which exports are compared: `requested`, else the most informative one.

    `where` is the key that names the requested metric, for messages.

    A mean over tokens is comparable only if they are the same tokens: longer ones are harder to predict.

    Raises InputError if an export does not predict the same as the first one on the same rows, or has no such metric.
    """
    first = inputs[0]
    for export, each in zip(exports, inputs, strict=True):
        if sorted(each.labels) != sorted(first.labels) or each.objective != first.objective:
            problem = f"predicts something else than {exports[0].name} ({each.objective}, {first.objective})"
            raise InputError(problem, export.path, "compare exports of one task")
        if each.predicts_classes and each.samples != first.samples:
            problem = f"reads {each.samples} of the rows, and {exports[0].name} {first.samples}"
            raise InputError(problem, export.path, "give rows that both can read")
    shared = [name for name in first.metrics if all(name in each.metrics for each in inputs)]
    metric = requested or shared[0]
    if metric not in shared:
        raise InputError(f"{metric} is not measured", where, f"use {', '.join(shared)}")
    for export, each in zip(exports, inputs, strict=True):
        if metric != BITS and each.predicted != first.predicted:
            problem = f"reads the rows as {each.predicted} tokens, and {exports[0].name} as {first.predicted}"
            hint = f"set {where} to {BITS}" if BITS in shared else "measure them apart"
            raise InputError(f"{problem}: their {metric} cannot be compared", export.path, hint)
    return metric


def _spec(export: ExportFolder, uri: str, overrides: Sequence[str]) -> JobSpec:
    spec, _ = spec_of_export(export.path, {SET: uri}, overrides)
    objective = spec.workload.objective
    if objective not in (*OF_CLASSES, *OF_TOKENS):
        known = ", ".join((*OF_CLASSES, *OF_TOKENS))
        hint = "compare it with `orchestrator evaluate`"
        raise InputError(f"was trained with {objective}, and bench measures {known}", export.path, hint)
    if objective in ("causal_lm", "conversation"):
        # An export's runtime does not support packed rows: one text per row, and no document within another's context.
        options = {"pack": "no"} if objective == "conversation" else {"documents": "pack"}
        spec = spec.model_copy(
            update={
                "workload": spec.workload.model_copy(update={"options": {**spec.workload.options, **options}})
            }
        )
    spec = resolve_paths(spec, Path.cwd())
    check_sources(spec.data, objective, spec.set_sources)
    return spec


def _arrays(held: HeldOut, count: int, export: ExportFolder) -> dict[str, np.ndarray]:
    batch: Mapping[str, Any] = held.batch(range(count))
    if unread := sorted(set(batch) - READ):
        raise InputError(
            f"reads {', '.join(unread)}, which bench cannot supply", export.path, "measure another export"
        )
    tokens = batch["tokens"].numpy()
    mask = batch["padding"].numpy() if "padding" in batch else np.ones(tokens.shape, dtype=bool)
    arrays = {TOKENS: tokens, MASK: mask}
    if "token_types" in batch:
        arrays[TYPES] = batch["token_types"].numpy()
    if "sequence_labels" in batch:
        arrays[CLASSES] = batch["sequence_labels"].numpy()
    else:
        arrays[LABELS] = batch["labels"].numpy()
    return arrays

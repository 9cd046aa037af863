"""A small version of a job's model, for a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED
from orchestrator.parallel.layout import Layout, ModelShape, split_problems
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.resolve.resolved_job import ResolvedJob
from workloads.model.small_config import narrow
from workloads.own.object_reference import is_object_reference

LARGEST = 8_000_000
"""The maximum number of parameters of a model that a rehearsal does not shrink."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers", "num_hidden_groups")  # fmt: skip
"""Names of the number of layers in transformers' configurations."""


@dataclass(frozen=True)
class SmallModel:
    """The changes to a job's workload, the remaining number of parameters, and the differences from the job, one line
    each.
    """

    changes: dict[str, Any]
    parameters: int
    notes: tuple[str, ...] = ()


def small_model(job: ResolvedJob, layout: Layout, folder: Path) -> SmallModel:
    """Return a version of the job's model that is small enough for CPUs, sharded as `layout` says.

    A small copy of a model in the Hugging Face format is written to `folder`. A model that is small already, the user's
    own, or one that needs the weights of another run is unchanged. Raises InputError if the model cannot be made small.
    """
    spec, workload = job.spec, job.spec.workload
    needs_weights = bool(workload.init_from) and (
        workload.adapter is not None or workload.objective in REFERENCED
    )
    if job.shape.parameters <= LARGEST or is_object_reference(workload.model) or needs_weights:
        return SmallModel({}, job.shape.parameters)
    notes = ["the weights of workload.init_from were not read"] if workload.init_from else []
    if workload.shrink:
        notes.append("workload.shrink was left out")
    result: dict[str, Any] = {"init_from": None, "grow": None, "shrink": None}
    if workload.model.startswith("hf:"):
        result |= {"model": f"hf:{folder}", "changes": {}}
        shape = _small_folder(job, layout, folder)
        notes.append("the weights of workload.model were random")
    else:
        config = job.model.as_transformer
        assert config is not None
        smaller = narrow(config, layout.tp, layout.stages, layout.ep)
        result["changes"] = workload.changes | smaller
        shape = model_shape(config.changed(smaller), spec.data.sequence_length)
        if workload.mup is not None:
            result["mup"] = None
            notes.append("workload.mup was left out")
    return SmallModel(result, shape.parameters, tuple(notes))


def _small_folder(job: ResolvedJob, layout: Layout, folder: Path) -> ModelShape:
    """Write a small copy of the model in a job's folder, with random weights. Return its sizes. Raises InputError."""
    import torch
    import transformers
    from transformers.utils import logging

    from workloads.describe import describe
    from workloads.hf.as_they_are.hf_class import auto_class, describe_hf_class
    from workloads.hf.check.small_copy import narrowings
    from workloads.hf.files.hf_config import FOLDER, read_hf_config

    workload, why = job.spec.workload, "it has no small copy"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = workload.model.removeprefix(FOLDER)
    for config in narrowings(read_hf_config(source, workload.changes)):
        _shallow(config, max(layout.stages, 2))
        config.problem_type = None  # its head is random, and predicts whatever the job trains
        if labels := job.spec.data.labels:
            config.id2label = dict(enumerate(labels))
        try:
            config.save_pretrained(folder)
            described = describe_hf_class(str(folder))
            if described.parameters() > 4 * LARGEST:
                why = f"its small copy has {described.parameters()} parameters"
                continue
            description = describe(
                f"{FOLDER}{folder}", {}, job.vocabulary_size, None, len(job.spec.data.labels) or None
            )
            shape = model_shape(description, job.spec.data.sequence_length)
            if problems := split_problems(layout, shape):
                why = problems[0]
                continue
            torch.manual_seed(job.spec.seed)
            kind = getattr(transformers, (config.architectures or [""])[0], None)
            made = kind(config) if kind else auto_class(described).from_config(config)
            made.save_pretrained(folder)
            return shape
        except Exception as error:  # each class fails in its own way on widths that it cannot have
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    raise InputError(
        f"cannot be tried in small ({why})", "workload.model", "try the job itself with run --smoke"
    )


def _shallow(config: Any, layers: int) -> None:
    """Reduce the number of layers in a transformers configuration, in nested ones, and in lists with one entry per
    layer.
    """
    from workloads.hf.files.hf_config import nested_configs

    for part in nested_configs(config):
        depths = {name: value for name in DEPTHS if type(value := vars(part).get(name)) is int}
        for name, value in list(vars(part).items()):
            if name in depths:
                setattr(part, name, min(value, layers))
            elif isinstance(value, list) and len(value) in depths.values() and len(value) > layers:
                setattr(part, name, _kinds(value, layers))


def _kinds(values: list[Any], count: int) -> list[Any]:
    """Return `count` entries that cover as many different values as possible."""
    different = list(dict.fromkeys(values)) if all(isinstance(v, str | int | float) for v in values) else []
    return [*different, *values][:count] if len(different) > 1 else values[:count]

"""A small model of the same kind: few and narrow layers, with every part that the large one has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED
from orchestrator.parallel.layout import Layout, ModelShape, split_problems
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.resolve.small_config import narrow
from workloads.model.config import TransformerConfig
from workloads.own.object_reference import is_object_reference

LARGEST = 8_000_000
"""Parameters of a model that is tried as it is."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers", "num_hidden_groups")  # fmt: skip
"""Names of the number of layers in configurations of transformers."""


@dataclass(frozen=True)
class SmallModel:
    """What to change of a job's workload, the parameters that are left, and what is not as in the job, line by line."""

    changes: dict[str, Any]
    parameters: int
    notes: tuple[str, ...] = ()


def small_model(job: ResolvedJob, layout: Layout, folder: Path) -> SmallModel:
    """The model of a job small enough to be tried on processors, divided as `layout` says; a copy of a model in the
    Hugging Face format is written to `folder`.

    A model that is small already, the user's own, or one that needs the weights of another run stays as it is. Raises
    InputError if there is no small one.
    """
    spec, asked = job.spec, job.spec.workload
    needs_weights = bool(asked.init_from) and (asked.adapter is not None or asked.objective in REFERENCED)
    if job.shape.parameters <= LARGEST or is_object_reference(asked.model) or needs_weights:
        return SmallModel({}, job.shape.parameters)
    notes = ["the weights of workload.init_from were not read"] if asked.init_from else []
    found: dict[str, Any] = {"init_from": None, "grow": None}
    if asked.model.startswith("hf:"):
        found |= {"model": f"hf:{folder}", "changes": {}}
        shape = _small_folder(job, layout, folder)
        notes.append("the weights of workload.model were random")
    else:
        config = job.model
        assert isinstance(config, TransformerConfig)
        found["changes"] = asked.changes | narrow(config, layout)
        with_changes = config.changed(narrow(config, layout))
        shape = model_shape(with_changes, spec.data.sequence_length)
        if asked.mup is not None:
            found["mup"] = None
            notes.append("workload.mup was left out")
    return SmallModel(found, shape.parameters, tuple(notes))


def _small_folder(job: ResolvedJob, layout: Layout, folder: Path) -> ModelShape:
    """Write a small copy of the model in a job's folder, with random weights; returns its sizes. Raises InputError."""
    import torch
    import transformers
    from transformers.utils import logging

    from workloads.describe import describe
    from workloads.hf.hf_class import auto_class, describe_hf_class
    from workloads.hf.hf_config import FOLDER, read_hf_config
    from workloads.hf.small_copy import narrowings

    asked, why = job.spec.workload, "it has no small copy"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = asked.model.removeprefix(FOLDER)
    for config in narrowings(read_hf_config(source, asked.changes)):
        _shallow(config, max(layout.stages, 2))
        config.problem_type = None  # its head is random, and predicts whatever the job asks for
        if labels := job.spec.data.labels:
            config.id2label = dict(enumerate(labels))
        try:
            config.save_pretrained(folder)
            described = describe_hf_class(str(folder))
            if described.parameters() > 4 * LARGEST:
                why = f"its small copy has {described.parameters()} parameters"
                continue
            found = describe(
                f"{FOLDER}{folder}", {}, job.vocabulary_size, None, len(job.spec.data.labels) or None
            )
            shape = model_shape(found, job.spec.data.sequence_length)
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
    """Fewer layers, of a configuration of transformers and those nested in it, and of lists with one entry a layer."""
    from workloads.hf.hf_config import nested_configs

    for part in nested_configs(config):
        depths = {name: value for name in DEPTHS if type(value := vars(part).get(name)) is int}
        for name, value in list(vars(part).items()):
            if name in depths:
                setattr(part, name, min(value, layers))
            elif isinstance(value, list) and len(value) in depths.values() and len(value) > layers:
                setattr(part, name, _kinds(value, layers))


def _kinds(values: list[Any], count: int) -> list[Any]:
    """So many entries, of as many different ones as there are."""
    different = list(dict.fromkeys(values)) if all(isinstance(v, str | int | float) for v in values) else []
    return [*different, *values][:count] if len(different) > 1 else values[:count]

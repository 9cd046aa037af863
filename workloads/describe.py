"""Derive a model's configuration from its name and changes in a job file. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FOLDER, FolderConfig, folder_config
from workloads.model import count
from workloads.model.config import TransformerConfig
from workloads.model.presets import preset
from workloads.own.object_reference import is_object_reference
from workloads.predicted import ALL, Predicted

if TYPE_CHECKING:
    from workloads.hf.as_they_are.hf_class import HuggingFaceModel
    from workloads.own.model import OwnModel

Description: TypeAlias = "TransformerConfig | HuggingFaceModel | OwnModel"
"""A model's description: a configuration of this project, a transformers class, or a user's own model that runs
unchanged.

Each of them answers, besides its sizes:

as_transformer: the configuration, if it says everything that the model computes; None if only a class's code does.
divided_by: what says how ranks may divide it: this project's `rules` for its layers, the `plan` of its transformers
class, or the own model's `declaration`. has_blocks: whether it has layers that can be recomputed or compiled one by
one. ends_in_head: whether its logits are the unchanged results of its output embeddings. tied: whether the output
projection is the embedding; None if the class decides. training_notes(name, length, dropout): one line for each
difference between training on sequences of this length and the model's configuration.
"""
Implementation: TypeAlias = Literal["auto", "transformers"]
"""Which code computes a model in a folder: this project's if possible, or transformers' in any case."""
SENTENCES = ("next_sentence", "sentence_order")
"""Objectives that label the whole sequence besides its tokens."""
TYPED = (*SENTENCES, "unified_lm", "translation_lm")
"""Objectives whose batches have two token types."""


SUPERVISED_HEADS = {
    "sequence_classification": "sequence",
    "multi_label_classification": "sequence",
    "regression": "sequence",
    "token_classification": "token",
    "span_extraction": "span",
    "reward": "sequence",
    "sentence_embeddings": "none",
}
"""The heads of supervised objectives."""
CLASSES = {"regression": 1, "reward": 1, "span_extraction": 2}
"""The number of outputs of heads that fix it."""
OWN_HEADS = {"encoder": ("sequence", "token", "span", "none"), "decoder": ("sequence", "token")}
"""The supervised heads that this project's models support, by architecture."""


def describe(
    model: str,
    changes: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    objective: str | None = None,
    classes: int | None = None,
    implementation: Implementation = "auto",
    kept: FolderConfig | None = None,
) -> Description:
    """Return the configuration of preset `model`, of the folder in `hf:<folder>`, or of `module:name`, with `changes`.

    A preset has `vocab_size` tokens unless `changes` give another number; a folder keeps its own. With `objective`, the
    model has the heads that the objective trains, with `classes` outputs. A folder with a conversion table becomes a
    model of this project, unless `implementation` is transformers. Its configuration is the run's `kept` copy, else the
    folder's.

    Raises WorkloadError for an unknown model or field, or for inconsistent sizes.
    """
    wanted = dict(changes or {})
    if is_object_reference(model):
        from workloads.own.model import describe_own

        return describe_own(model, wanted, vocab_size)
    if not model.startswith(FOLDER):
        if vocab_size is not None:
            wanted.setdefault("vocab_size", vocab_size)
        config = preset(model).changed(wanted)
        return config if objective is None else _of_objective(model, config, objective, wanted, classes)
    from workloads.hf.as_they_are.hf_class import describe_hf_class
    from workloads.hf.convert.folder import describe_folder

    folder = model.removeprefix(FOLDER)
    kept = kept or folder_config(folder)
    if implementation == "auto":
        described = describe_folder(folder, kept).changed(wanted)
    else:
        described = describe_hf_class(folder, kept=kept).changed(wanted)
    return (
        described
        if objective is None
        else _of_objective(model, described, objective=objective, changes=wanted, classes=classes, kept=kept)
    )


def _of_objective(
    model: str,
    described: TransformerConfig | HuggingFaceModel,
    objective: str,
    changes: Mapping[str, Any],
    classes: int | None,
    kept: FolderConfig | None = None,
) -> Description:
    config = headed(model, described, objective=objective, changes=changes, classes=classes, kept=kept)
    return for_objective(config, objective, classes) if isinstance(config, TransformerConfig) else config


def headed(
    model: str,
    described: TransformerConfig | HuggingFaceModel,
    objective: str,
    changes: Mapping[str, Any],
    classes: int | None,
    kept: FolderConfig | None = None,
) -> TransformerConfig | HuggingFaceModel:
    """Return the model with the head that `objective` trains, with `classes` outputs.

    A transformers class gets its own head. If this project's model of a folder does not support the head, the folder's
    transformers class is used unchanged, with configuration `kept`. Raises WorkloadError if no class supports it.
    """
    from workloads.hf.as_they_are.hf_class import HuggingFaceModel, describe_hf_class

    head = SUPERVISED_HEADS.get(objective)
    if isinstance(described, HuggingFaceModel):
        if head is None or objective == "reward":
            return described
        return described.with_head(head, CLASSES.get(objective, classes or 2))
    if head is None:
        return described
    if head in OWN_HEADS.get(described.architecture, ()) and not (
        model.startswith(FOLDER) and _lacks(described, head)
    ):
        return described
    if not model.startswith(FOLDER):
        raise WorkloadError(
            f"{model} ({described.architecture}) has no head for {objective} here; export it, and give "
            "hf:<folder>, whose class of transformers has one"
        )
    theirs = describe_hf_class(model.removeprefix(FOLDER), kept=kept).changed(changes)
    return theirs.with_head(head, CLASSES.get(objective, classes or 2))


def _lacks(config: TransformerConfig, head: str) -> bool:
    """Return whether weights with such a head can be neither read from nor written for transformers' class."""
    from workloads.hf.tables.families import FAMILIES

    family = FAMILIES.get(config.family)
    return family is not None and head not in family.heads


def for_objective(config: TransformerConfig, objective: str, classes: int | None = None) -> TransformerConfig:
    """Return the configuration with exactly the heads that `objective` trains.

    Raises WorkloadError if the model cannot have them.
    """
    if head := SUPERVISED_HEADS.get(objective):
        count = CLASSES.get(objective, classes or config.classes or 2)
        return config.changed({"head": head, "sentence_head": False, "generator": 0, "classes": count})
    if config.architecture not in ("encoder", "prefix"):
        return config
    if objective == "blank_infilling" and not config.block_positions:
        raise WorkloadError(
            "blank_infilling needs two positions per token; use glm-base or set block_positions"
        )
    if objective == "replaced_token_detection":
        if not config.generator:
            raise WorkloadError(
                "replaced_token_detection needs a generator; use electra-base or set generator"
            )
        return config.changed({"head": "discriminator", "sentence_head": False})
    head = config.head if config.head in ("language", "masked") else "masked"
    types = 2 if objective in TYPED and config.token_types == 1 else config.token_types
    wanted = {"head": head, "generator": 0, "sentence_head": objective in SENTENCES, "token_types": types}
    return config.changed(wanted)


def parameters(config: Description) -> int:
    """Return the number of trained parameters, see `count.parameters`."""
    return count.parameters(config) if isinstance(config, TransformerConfig) else config.parameters()


def flops(config: Description, sequence_length: int, predicted: Predicted = ALL) -> float:
    """Return the FLOPs of a forward and backward pass per token, see `count.flops`."""
    if isinstance(config, TransformerConfig):
        return count.flops(config, sequence_length, predicted)
    return config.flops(sequence_length)

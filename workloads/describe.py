"""The configuration of a model by its name and changes in a job file, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from workloads.errors import WorkloadError
from workloads.hf.hf_config import FOLDER
from workloads.model import count
from workloads.model.config import TransformerConfig
from workloads.model.presets import preset
from workloads.own.reference import is_reference

if TYPE_CHECKING:
    from workloads.hf.hf_class import HuggingFaceModel
    from workloads.own.model import OwnModel

Description: TypeAlias = "TransformerConfig | HuggingFaceModel | OwnModel"
"""What a model is made of: one of this project, a class of transformers or a user's own that is run as it is."""
SENTENCES = ("next_sentence", "sentence_order")
"""Objectives with a label of the whole sequence besides those of the tokens."""
TYPED = (*SENTENCES, "unified_lm", "translation_lm")
"""Objectives whose batches have two token types."""


SUPERVISED_HEADS = {
    "sequence_classification": "sequence",
    "regression": "sequence",
    "token_classification": "token",
    "span_extraction": "span",
    "reward": "sequence",
}
"""The heads of supervised objectives."""


def describe(
    model: str,
    changes: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    objective: str | None = None,
    classes: int | None = None,
) -> Description:
    """The configuration of preset `model`, of the folder in `hf:<folder>`, or of `module:name`, with `changes`.

    A preset has `vocab_size` tokens unless `changes` give another number; a folder keeps its own. With `objective` the
    model has the heads that it trains, of so many `classes`. Raises WorkloadError for an unknown model or field, or
    sizes that do not fit each other.
    """
    wanted = dict(changes or {})
    if is_reference(model):
        from workloads.own.model import describe_own

        return describe_own(model, wanted, vocab_size)
    if not model.startswith(FOLDER):
        if vocab_size is not None:
            wanted.setdefault("vocab_size", vocab_size)
        config = preset(model).changed(wanted)
        return config if objective is None else for_objective(config, objective, classes)
    from workloads.hf.folder import describe_folder
    from workloads.hf.hf_class import HuggingFaceModel

    found = describe_folder(model.removeprefix(FOLDER)).changed(wanted)
    if isinstance(found, HuggingFaceModel) or objective is None:
        return found
    return for_objective(found, objective, classes)


def for_objective(config: TransformerConfig, objective: str, classes: int | None = None) -> TransformerConfig:
    """The configuration with the heads that `objective` trains and no others.

    Raises WorkloadError if the model cannot have them.
    """
    if head := SUPERVISED_HEADS.get(objective):
        count = {"regression": 1, "reward": 1, "span_extraction": 2}.get(
            objective, classes or config.classes or 2
        )
        return config.changed({"head": head, "sentence_head": False, "generator": 0, "classes": count})
    if config.architecture not in ("encoder", "prefix"):
        return config
    if objective == "blank_infilling" and not config.block_positions:
        raise WorkloadError(
            "blank_infilling needs two positions a token; use glm-base or set block_positions"
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
    """Number of trained parameters; see `count.parameters`."""
    return count.parameters(config) if isinstance(config, TransformerConfig) else config.parameters()


def flops(config: Description, sequence_length: int) -> float:
    """FLOPs of a forward and backward pass per token; see `count.flops`."""
    if isinstance(config, TransformerConfig):
        return count.flops(config, sequence_length)
    return config.flops(sequence_length)

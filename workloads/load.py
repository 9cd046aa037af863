"""Load a workload (model and objective) by the names and options of a job file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from workloads import objectives
from workloads.adapters.adapter import Adapter
from workloads.describe import (
    FOLDER,
    SENTENCES,
    SUPERVISED_HEADS,
    Description,
    Implementation,
    describe,
    for_objective,
    headed,
)
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.files.hf_config import FolderConfig, root
from workloads.hf.files.meaning import (
    FolderMeaning,
    by_label,
    compares_labels,
    folder_meaning,
    generation_of,
    naming_labels,
    vocabulary_of_folder,
)
from workloads.hf.files.weight_names import check_of_class, weights_of_model
from workloads.hf.tables.our_names import in_our_names
from workloads.model.config import TransformerConfig
from workloads.model.mup import with_base
from workloads.model.stored import StoredWeights
from workloads.objectives.sampled import RULE
from workloads.own.model import OwnModel, OwnWorkload
from workloads.own.samples import SAMPLES, OfSamples
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Generation, Objective, Vocabulary

Begin: TypeAlias = Callable[
    [TransformerConfig | OwnModel, Mapping[str, torch.Size], Collection[str], int], StoredWeights
]
"""Reads the weights for a model of these shapes, given its token tables and the first added token as in
`stored.misfits`.
"""
OUT_OF_ORDER = ("permuted_lm", "blank_infilling")
"""Objectives whose rows are not in text order."""
NOT_OF_HF_CLASSES = (
    *SENTENCES,
    "replaced_token_detection",
    "reward",
    "grpo",
    "reinforce",
    "sentence_embeddings",
)
"""Objectives that need heads, losses or batched generation that an unchanged Hugging Face class lacks."""


def load(
    model: str,
    objective: str,
    vocabulary: Vocabulary,
    *,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mup: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    layer_drop: float = 0.0,
    embedding_noise: float = 0.0,
    head_gates: bool = False,
    sequence_length: int,
    seed: int = 0,
    rule: int = RULE,
    described: Description | None = None,
    begin: Begin | None = None,
    labels: Sequence[str] = (),
    adapter: Adapter | None = None,
    implementation: Implementation = "auto",
    kept: FolderConfig | None = None,
) -> TransformerWorkload | HuggingFaceWorkload | OwnWorkload:
    """Return the workload of preset `model` (with `changes`), of `hf:<folder>` or of `module:name`, trained with
    `objective`.

    With an adapter, only the adapter and newly initialised heads are trained. A folder's model gets a row for each
    token that was added to its tokenizer.

    Args:
        model: the name of the model.
        objective: the name of the objective.
        vocabulary: the vocabulary of the tokenizer.
        changes: changed fields of a preset.
        options: the options of the objective.
        mup: the widths of the base model for muP, see `workloads.model.mup`.
        dropout: the rate of dropout, see `workloads.model.dropout`.
        attention_dropout: the rate of attention dropout.
        layer_drop: the rate of skipped layers.
        embedding_noise: the alpha of the noise on embeddings, see `workloads.model.dropout.noisy`.
        head_gates: whether each attention head gets a gate, see `workloads.model.head_gates`.
        sequence_length: tokens of a sample.
        seed: the seed of the run.
        rule: the sampling rule of the run's data, see `workloads.objectives.sampled`.
        described: the result of `describe`, if it was called before.
        begin: reads other initial weights than the folder's.
        labels: the names of a classifier's labels.
        adapter: the adapter to train.
        implementation: see `describe`.
        kept: the run's copy of the folder's configuration.

    Raises:
        WorkloadError: for an unknown model, field or objective, an objective that the architecture cannot train, a
            sequence longer than the model's positions, a vocabulary larger than the model's, a checkpoint that does not
            fit, or a base model with other tensors.
    """
    if mup is not None and model.startswith(FOLDER):
        raise WorkloadError(
            f"mup scales weights that start from random values, and {model} has weights; use a preset or set "
            f"mup to null"
        )
    if described is None:
        described = describe(model, changes, vocabulary.size, implementation=implementation, kept=kept)
    config = described
    if not isinstance(config, OwnModel):
        config = headed(
            model, config, objective=objective, changes=changes or {}, classes=len(labels) or None, kept=kept
        )
    if isinstance(config, TransformerConfig) and vocabulary.added <= config.vocab_size < vocabulary.size:
        config = config.changed({"vocab_size": vocabulary.size})
    taken = adapter.positions if adapter else 0
    _check(model, config, objective, vocabulary, sequence_length + taken)
    _check_noise(model, config, embedding_noise)
    if isinstance(config, OwnModel) and objective == SAMPLES:
        return _own(OwnWorkload(model, config, OfSamples(), vocabulary), adapter, begin)
    meaning = folder_meaning(model.removeprefix(FOLDER), kept) if model.startswith(FOLDER) else None
    if meaning and rule > 5 and _decodes(config, objective):
        vocabulary = _with_decoder_start(
            model,
            config,
            vocabulary=vocabulary,
            meaning=meaning,
            objective=objective,
            start=(options or {}).get("start", -1),
        )
    built = objectives.build(
        objective,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        seed=seed,
        rule=rule,
        labels=labels,
        typed=getattr(config, "token_types", 0) > 1,
        **(options or {}),
    )
    if isinstance(config, OwnModel):
        return _own(OwnWorkload(model, config, built, vocabulary), adapter, begin)
    generation = generation_of(vocabulary, meaning, built) if meaning else Generation()
    if isinstance(config, HuggingFaceModel):
        config = config.padded_with(vocabulary.padding)
        _check_class_options(model, begin, layer_drop, attention_dropout, head_gates)
        check_of_class(str(root(config.folder)))
        workload = HuggingFaceWorkload(
            model, config, built, vocabulary, dropout, generation=generation, meaning=meaning
        )
        workload.check_labels()
        return workload if adapter is None else workload.with_adapter(adapter)
    _check_token_types(model, config, objective)
    config = for_objective(config, objective, len(labels) or None)
    if not model.startswith(FOLDER):
        config = _completed(config, vocabulary, sequence_length)
    _check_layers(config, layer_drop, head_gates)
    config = replace(
        config,
        dropout=dropout,
        attention_dropout=attention_dropout,
        layer_drop=layer_drop,
        embedding_noise=embedding_noise,
        head_gates=head_gates,
    )
    if mup is None:
        made = _workload(model, config, objective=built, vocabulary=vocabulary, begin=begin, meaning=meaning)
        made = replace(made, generation=generation)
        with in_our_names(config):
            return made if adapter is None else made.with_adapter(adapter)
    return _workload(
        model, _scaled(model, with_base(config, mup), built, vocabulary), built, vocabulary, begin
    )


def _check_noise(model: str, config: Description, embedding_noise: float) -> None:
    """Raise WorkloadError if a model's embeddings get no noise here."""
    supports_noise = isinstance(config, TransformerConfig) and config.architecture != "encoder-decoder"
    if embedding_noise and not supports_noise:
        raise WorkloadError(
            f"workload.embedding_noise needs an encoder or a decoder of this project, and {model} is neither; set it "
            "to 0"
        )


def _check_token_types(model: str, config: TransformerConfig, objective: str) -> None:
    """Raise WorkloadError if the weights in a folder have fewer token types than the objective needs."""
    wanted = for_objective(config, objective).token_types
    if model.startswith(FOLDER) and wanted > config.token_types and weights_of_model(model):
        raise WorkloadError(
            f"{objective} tells two texts apart by their token types, and {model} has {config.token_types}; use a "
            f"model with {wanted}, such as a BERT"
        )


def _with_decoder_start(
    model: str,
    config: Description,
    vocabulary: Vocabulary,
    meaning: FolderMeaning,
    objective: str,
    start: int,
) -> Vocabulary:
    """Return the vocabulary with the start token of this folder's decoder. Raises WorkloadError
    if the model lacks it.
    """
    vocabulary = vocabulary_of_folder(vocabulary, meaning, objective, start)
    if (vocabulary.decoder_start or 0) >= config.vocab_size:
        raise WorkloadError(
            f"the decoder of {model} begins with token {vocabulary.decoder_start}, and the model has "
            f"{config.vocab_size}; fix decoder_start_token_id in its config.json"
        )
    return vocabulary


def _check_layers(config: TransformerConfig, layer_drop: float, head_gates: bool) -> None:
    """Raise WorkloadError if layers cannot be skipped, or heads have no gates, in a model like this."""
    if layer_drop and config.moe:
        raise WorkloadError(
            "workload.layer_drop skips layers for each sample separately, but routers balance experts over all "
            "samples; set it to 0"
        )
    if head_gates and config.generator:
        raise WorkloadError(
            "workload.head_penalty is for one network, and this objective trains two; set it to 0, and prune the heads "
            "of the exported discriminator in another run"
        )


def _check_class_options(
    model: str, begin: Begin | None, layer_drop: float, attention_dropout: float, head_gates: bool
) -> None:
    """Raise WorkloadError for options that an unchanged transformers class does not support."""
    if begin is not None:
        raise WorkloadError(
            f"{model} runs as a class of transformers; name the folder with its weights in workload.model, not in "
            "init_from"
        )
    if layer_drop:
        raise WorkloadError(
            f"workload.layer_drop needs a class of this project, and {model} runs as a class of transformers; "
            "set it to 0"
        )
    if attention_dropout:
        raise WorkloadError(
            f"workload.attention_dropout needs a class of this project, and {model} runs as a class of "
            "transformers; set it to 0"
        )
    if head_gates:
        raise WorkloadError(
            f"workload.head_penalty needs a class of this project, and {model} runs as a class of transformers; "
            "set it to 0"
        )


def _decodes(config: Description, objective: str) -> bool:
    """Return whether the decoder of an encoder-decoder generates text, which needs a start token."""
    return config.architecture == "encoder-decoder" and objective not in SUPERVISED_HEADS


def _own(workload: OwnWorkload, adapter: Adapter | None, begin: Begin | None) -> OwnWorkload:
    if begin is not None:
        begun = begin(workload.config, workload.shapes, (), workload.vocabulary.added)
        workload = replace(workload, begun=begun, notes=begun.notes)
    return workload if adapter is None else workload.with_adapter(adapter)


def _completed(config: TransformerConfig, vocabulary: Vocabulary, sequence_length: int) -> TransformerConfig:
    """Return a preset with the fields that depend on vocabulary and length, as in transformers' configuration."""
    if config.family == "roberta" and vocabulary.pad is not None:
        # RoBERTa counts positions from the padding id; transformers derives the offset from it.
        return config.changed({"position_offset": vocabulary.pad + 1})
    if config.family == "switch" and config.moe and config.moe.capacity_factor is not None:
        # Switch in transformers has one capacity for both stacks and every length.
        capacity = config.moe.at_length(sequence_length)
        return config.changed({"moe": {"capacity": capacity, "capacity_factor": None}})
    return config


def _scaled(
    model: str, config: TransformerConfig, objective: Objective, vocabulary: Vocabulary
) -> TransformerConfig:
    workload = TransformerWorkload(model, config, objective, vocabulary)
    if other := workload.shapes.keys() ^ workload.base_shapes.keys():
        raise WorkloadError(
            f"only one of the model and the base that mup names has {min(other)}; "
            "give it widths at which both have the same tensors"
        )
    return config


def _workload(
    model: str,
    config: TransformerConfig,
    objective: Objective,
    vocabulary: Vocabulary,
    begin: Begin | None,
    meaning: FolderMeaning | None = None,
) -> TransformerWorkload:
    workload = TransformerWorkload(model, config, objective, vocabulary, meaning=meaning)
    if begin is not None:
        weights = begin(config, workload.shapes, workload.tables, vocabulary.added)
        return replace(workload, pretrained=weights)
    if (folder := weights_of_model(model)) is None:
        return workload
    from workloads.hf.convert.load_weights import pretrained

    if not compares_labels(objective):
        weights = pretrained(config, workload.shapes, folder, workload.tables, vocabulary.added)
        return replace(workload, pretrained=weights)
    labels = getattr(objective, "labels", ())
    theirs = workload.meaning or folder_meaning(folder)
    with naming_labels(theirs, objective.name, labels, folder):
        weights = pretrained(config, workload.shapes, folder, workload.tables, vocabulary.added)
    return replace(workload, pretrained=by_label(weights, theirs, objective.name, labels, folder))


def _check(
    model: str,
    config: Description,
    objective: str,
    vocabulary: Vocabulary,
    sequence_length: int,
) -> None:
    if isinstance(config, OwnModel):
        return
    hf_class = isinstance(config, HuggingFaceModel)
    if config.architecture not in objectives.architectures(objective) or (
        hf_class and objective in NOT_OF_HF_CLASSES
    ):
        fitting = [n for n in objectives.NAMES if config.architecture in objectives.architectures(n)]
        fitting = [n for n in fitting if not hf_class or n not in NOT_OF_HF_CLASSES]
        raise WorkloadError(
            f"objective {objective} does not train {model} ({config.architecture}); "
            f"use {', '.join(fitting) or 'another model'}"
        )
    if config.vocab_size < vocabulary.size:
        raise WorkloadError(
            f"{model} has {config.vocab_size} tokens but the tokenizer {vocabulary.size}; "
            "use the model's own tokenizer, or leave vocab_size out"
        )
    window = config.window if isinstance(config, TransformerConfig) else 0
    if objective in OUT_OF_ORDER and 0 < window < sequence_length:
        raise WorkloadError(
            f"{objective} puts its targets after the text, and the attention window of {window} of {model} hides the "
            "text from them; set window to 0, or take another objective"
        )
    limited = isinstance(config, HuggingFaceModel) or config.positions == "learned"
    if objectives.compares(objective):  # each of the two answers starts at position 0
        sequence_length //= 2
    if limited and sequence_length > config.max_positions:
        raise WorkloadError(
            f"sequence_length {sequence_length} exceeds the {config.max_positions} positions of {model}; "
            "lower it, or raise workload.changes.max_positions (max_position_embeddings of a class of transformers)"
        )

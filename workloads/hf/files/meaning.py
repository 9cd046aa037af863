"""The meaning of a pretrained folder beyond its weights: the label of each number, and how a text begins and ends.

A forward pass reads none of this, so a mistake here shows up only as wrong results. Training, evaluation, prompts and
export read it only from here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import (
    GENERATION,
    AnyMethod,
    FolderConfig,
    folder_config,
    read_hf_config,
    root,
)

if TYPE_CHECKING:
    from workloads.model.stored import StoredWeights
    from workloads.workload import Generation, Objective, Vocabulary

GENERIC = re.compile(r"LABEL_\d+")
"""transformers' default names for unnamed labels."""
PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "sequence_classification": "single_label_classification",
        "multi_label_classification": "multi_label_classification",
        "regression": "regression",
    }
)
"""transformers' name of the loss of each objective that trains a head over whole texts."""
LABELLED = ("sequence_classification", "multi_label_classification", "token_classification")
"""Objectives that predict a label."""
SHOWN = 8
"""Maximum number of labels that a line lists."""
BY_NAME = 6
"""The first rule by which a run compares the labels of a head by name; see `workloads.objectives.sampled.RULE`."""
SETTINGS = GENERATION
WRITTEN = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
"""Tokens for which an exported configuration and its generation settings must agree."""
BY_LAST_TOKEN = frozenset({"mbart", "plbart", "fsmt"})
"""Classes, by model_type, whose training begins a decoder with the last token of its target, whatever the
configuration says.
"""
OF_LANGUAGES = frozenset({"mbart", "m2m_100", "nllb-moe", "plbart"})
"""Classes whose texts begin or end with a language token."""
BY_INNER_BOS = frozenset({"t5gemma", "t5gemma2"})
"""Classes whose training begins a decoder with the bos of the nested configuration."""


@dataclass(frozen=True)
class FolderMeaning:
    """What a pretrained folder's configuration files say about labels and tokens.

    Attributes:
        labels: the label of each row of the classification head, in order; empty if the folder names none.
        problem_type: transformers' name of the classification head's loss; None if unknown.
        folder: the folder.
        model_type: transformers' name of the model's kind.
        decoder_start: the token with which the class's training begins a decoder; None if unknown.
        pad: the padding token; None if unknown.
        settings: those of generation_config.json, or of an earlier version's config.json, by name.
    """

    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    folder: str = ""
    model_type: str = ""
    decoder_start: int | None = None
    pad: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def folder_meaning(folder: str, kept: FolderConfig | None = None) -> FolderMeaning:
    """Read the meaning of the folder (or its config.json), from the configuration that a run has `kept`, if any.

    Raises WorkloadError if transformers cannot read it.
    """
    config = read_hf_config(folder, quantised=AnyMethod(), kept=kept)
    return FolderMeaning(
        labels=_labels(config),
        problem_type=getattr(config, "problem_type", None),
        folder=str(root(folder)),
        model_type=config.model_type,
        decoder_start=_decoder_start(config),
        pad=_one(getattr(config, "pad_token_id", None)),
        settings=_settings(folder, kept or folder_config(folder)),
    )


def vocabulary_of_folder(
    vocabulary: Vocabulary, meaning: FolderMeaning, objective: str, start: int = -1
) -> Vocabulary:
    """Return the vocabulary, completed for an encoder-decoder that `objective` trains.

    A target gets the same special tokens as a source, with the target's language in place of the source's. The
    decoder begins with the token that the class uses in training. `start` is the token that the job names for that;
    -1 if it names none. Raises WorkloadError if the folder is ambiguous, or does not name a target's language.
    """
    target = _target(vocabulary, meaning) if objective == "seq2seq" else None
    if type(start) is int and start >= 0:
        return replace(vocabulary, target=target)
    named = {
        "config.json": meaning.decoder_start,
        SETTINGS: _one(meaning.settings.get("decoder_start_token_id")),
    }
    if objective == "seq2seq" and meaning.model_type in BY_LAST_TOKEN:
        frame = target or (vocabulary.frame.single if vocabulary.frame else ((), (vocabulary.eos,)))
        named["the end of a target"] = next(iter(frame[1][-1:]), None)
    start_by_source = {source: token for source, token in named.items() if token is not None}
    if len({*start_by_source.values()}) > 1:
        conflict = " and ".join(f"{source} says {token}" for source, token in start_by_source.items())
        hint = "name one in workload.options.start" if objective == "seq2seq" else "make them the same"
        raise WorkloadError(f"the decoder of {meaning.folder} starts with two tokens: {conflict}; {hint}")
    return replace(vocabulary, target=target, decoder_start=next(iter(start_by_source.values()), None))


def generation_of(vocabulary: Vocabulary, meaning: FolderMeaning, objective: Objective) -> Generation:
    """Return how a model of the folder continues and ends a text.

    The folder's settings apply, except for the first token of a target, which the objective trains.
    """
    # imports torch, which callers that only read labels do not need
    from workloads.workload import Generation

    settings = dict(meaning.settings)
    notes: list[str] = []
    if around := getattr(objective, "around_target", None):
        first = around[0][:1]
        forced = _one(settings.get("forced_bos_token_id"))
        if vocabulary.target is not None and first:
            settings["forced_bos_token_id"] = first[0]
        elif forced is not None and (forced,) != first:
            del settings["forced_bos_token_id"]
            notes = [
                f"{meaning.folder} forces answers to begin with token {forced}, but targets here do not begin "
                "with it: this setting is ignored"
            ]
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    known = [token for token in ends if isinstance(token, int)]
    return Generation(settings=settings, notes=tuple(notes)).ending(*known)


def generates(config: Any) -> bool:
    """Return whether a model of this configuration generates text."""
    return config.head == "language" and config.architecture in ("decoder", "encoder-decoder")


def as_written(ends: Sequence[int]) -> int | list[int]:
    """Return the tokens that end a text in the form of transformers' files."""
    return ends[0] if len(ends) == 1 else list(ends)


def write_settings(folder: str, generation: Generation, hf_config: Any) -> None:
    """Write the generation_config.json of an export: the settings, with the tokens that its configuration names."""
    named = {name: getattr(hf_config, name, None) for name in WRITTEN}
    settings = {**generation.settings, **{name: token for name, token in named.items() if token is not None}}
    (Path(folder) / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _target(vocabulary: Vocabulary, meaning: FolderMeaning) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the special tokens around a target; None if they equal those around a source. Raises WorkloadError."""
    if vocabulary.frame is None:
        return None
    before, after = vocabulary.frame.single
    source = vocabulary.source_language
    if source not in (*before, *after):
        unnamed = {*before, *after} - vocabulary.special
        source = unnamed.pop() if len(unnamed) == 1 else None
    if source is None:
        return None
    named = {
        "tgt_lang of the tokenizer": vocabulary.target_language,
        "forced_bos_token_id": _one(meaning.settings.get("forced_bos_token_id")),
        "decoder_start_token_id": meaning.decoder_start,
    }
    language_by_source = {
        k: token for k, token in named.items() if token is not None and token not in vocabulary.special
    }
    if len({*language_by_source.values()}) > 1:
        conflict = " and ".join(
            f"{source_name} is {token}" for source_name, token in language_by_source.items()
        )
        raise WorkloadError(f"{meaning.folder} names two target languages: {conflict}; make them the same")
    if (
        not language_by_source
        and vocabulary.source_language is None
        and meaning.model_type not in OF_LANGUAGES
    ):
        return None  # the token is not a language
    if not language_by_source:
        raise WorkloadError(
            f"the tokenizer marks the language of a text (token {source}), but nothing names the language of a target; "
            f"name it as tgt_lang in tokenizer_config.json, or as forced_bos_token_id in {SETTINGS}"
        )
    (language,) = {*language_by_source.values()}
    swapped = [tuple(language if token == source else token for token in side) for side in (before, after)]
    return swapped[0], swapped[1]


def _one(token: Any) -> int | None:
    """Return a token that may be written as a list with one element."""
    if isinstance(token, Sequence) and len(token) == 1:
        return _one(token[0])
    return token if type(token) is int else None


def _decoder_start(config: Any) -> int | None:
    if config.model_type in BY_INNER_BOS:
        return _one(config.decoder.bos_token_id)
    return _one(getattr(config, "decoder_start_token_id", None))


def _settings(folder: str, files: FolderConfig) -> dict[str, Any]:
    """Return the settings that transformers' `generate` would use by default."""
    path = root(folder) / (SETTINGS if files.generation else "config.json")
    try:
        settings = json.loads(files.generation or files.config)
        if not files.generation:
            from transformers import GenerationConfig

            settings = GenerationConfig.from_model_config(settings).to_diff_dict()
        settings = dict(settings)
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{path} cannot be read ({error}); fix it") from error
    return {k: v for k, v in settings.items() if k not in ("transformers_version", "_from_model_config")}


def rows_of_labels(
    theirs: Sequence[str], ours: Sequence[str], where: str, is_folder: bool = True, rows: int | None = None
) -> tuple[int, ...]:
    """Return the row of a head at `where` for each label in `ours`.

    `theirs` are the labels of its rows; empty if they are unnamed. `rows` is the number of its rows, if known. Raises
    WorkloadError if the labels differ.
    """
    theirs = _named(theirs, ours)
    if not theirs and ours and rows not in (None, len(ours)):
        raise WorkloadError(
            f"the head of {where} predicts {rows} labels, which have no names, and data.labels names {len(ours)} "
            f"({_listed(ours)}); name all of its labels in data.labels, in the order of its rows"
        )
    if not theirs or not ours:
        return tuple(range(len(ours)))
    if sorted(theirs) != sorted(ours):
        strange = [label for label in ours if label not in theirs] or ours
        renamed = (
            ", or rename them in id2label of its config.json if they mean the same; for a new head, give a copy of the "
            "folder that transformers' AutoModel has saved, which has none"
            if is_folder
            else ""
        )
        raise WorkloadError(
            f"the head of {where} predicts {_listed(theirs)}, and data.labels names {_listed(strange)}; "
            f"name the head's labels in data.labels, in any order{renamed}"
        )
    return tuple(theirs.index(label) for label in ours)


def _named(theirs: Sequence[str], ours: Sequence[str]) -> Sequence[str]:
    """Return the labels of a head's rows. Default names become those of `ours` if nobody named the rows."""
    if theirs or not all(GENERIC.fullmatch(label) for label in ours):
        return theirs
    return [f"LABEL_{number}" for number in range(len(ours))]


def compares_labels(objective: Any) -> bool:
    """Return whether an objective trains a head whose labels or problem have names to compare."""
    return objective.name in (*PROBLEMS, *LABELLED) and getattr(objective, "rule", BY_NAME) >= BY_NAME


def by_label(
    weights: StoredWeights,
    theirs: FolderMeaning,
    objective: str,
    labels: Sequence[str],
    where: str,
    is_folder: bool = True,
) -> StoredWeights:
    """Return the weights at `where` with the head's rows in the order of these labels.

    `theirs` is the meaning of the head there. A new head, or one with unnamed labels, is unchanged. Raises
    WorkloadError if the head predicts other labels, or was trained for another problem than the objective's.
    """
    from workloads.model.stored import OUTPUT, ReorderedHead

    if objective not in (*PROBLEMS, *LABELLED) or weights.find(OUTPUT[0]) is None:
        return weights
    check_problem(theirs.problem_type, objective, where)
    rows = rows_of_labels(theirs.labels, labels, where, is_folder)
    return ReorderedHead(weights, rows, notes_of_labels(theirs.labels, labels, where))


@contextmanager
def naming_labels(
    theirs: FolderMeaning, objective: str, labels: Sequence[str], where: str, is_folder: bool = True
) -> Iterator[None]:
    """Name the labels in the error about a head at `where` with another number of outputs than the objective's."""
    from workloads.model.stored import OUTPUT, DoesNotFit

    try:
        yield
    except DoesNotFit as error:
        rows = next(
            (
                misfit.stored_shape[0]
                for misfit in error.misfits
                if misfit.name == OUTPUT[0] and misfit.stored_shape
            ),
            None,
        )
        if rows is not None and objective in LABELLED:
            rows_of_labels(theirs.labels, labels, where, is_folder, rows)
        elif rows is not None and objective in PROBLEMS:
            named = f" ({_listed(theirs.labels)})" if theirs.labels else ""
            raise WorkloadError(
                f"the head of {where} predicts {rows} labels{named}, and {objective} trains one number; give another "
                "checkpoint"
            ) from None
        raise


def notes_of_labels(theirs: Sequence[str], ours: Sequence[str], where: str) -> tuple[str, ...]:
    """Return one line if the rows of a head are reordered to `ours`, or if its labels are unnamed."""
    theirs = _named(theirs, ours)
    if not theirs and ours:
        return (f"the labels of {where} are unnamed: its rows are taken for {_listed(ours)}, in this order",)
    if ours and list(theirs) != list(ours):
        return (f"the head of {where} predicts {_listed(theirs)}: its rows follow data.labels by name",)
    return ()


def names_of_outputs(labels: Sequence[str], theirs: FolderMeaning, classes: int) -> list[str]:
    """Return the names of a head's outputs in an export: the labels, else those of the model's folder."""
    if not labels and len(theirs.labels) == classes:
        return list(theirs.labels)
    return list(labels) or [f"LABEL_{number}" for number in range(classes)]


def check_problem(problem_type: str | None, objective: str, where: str) -> None:
    """Raise WorkloadError if the head at `where` was trained for another problem than the objective's."""
    wanted = PROBLEMS.get(objective)
    if wanted is None or problem_type in (None, wanted):
        return
    raise WorkloadError(
        f"the head of {where} was trained for {problem_type}, and {objective} trains {wanted}; give another "
        "checkpoint, or remove problem_type from its config.json if its outputs mean that"
    )


def _listed(labels: Sequence[str]) -> str:
    """Return the first labels as text."""
    return ", ".join(labels[:SHOWN]) + (", ..." if len(labels) > SHOWN else "")


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Token roles with a name in transformers, such as eos_token."""
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes of transformers that name no token by default."""


def tokens_of_files(config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, such as eos_token, that transformers reads for a class without default
    names.

    `config` is the tokenizer_config.json, `named` the content of special_tokens_map.json, which takes precedence,
    nulls included.
    """
    roles = {f"{role}_token" for role in ROLES}
    values = {name: value for name, value in config.items() if name in roles}
    values |= {name: value for name, value in named.items() if name in roles}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        values |= extra
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


@lru_cache(maxsize=4)  # a command asks several times, and each call takes a second
def _tokenizer_in(folder: str, files: tuple[tuple[str, int, int, int], ...]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # of any class of transformers
        return None


def tokenizer_of_class(folder: str) -> Any:
    """Return the tokenizer that transformers makes from a local folder; None if it makes none. It is made again only
    if a file has changed. Callers must not change it.
    """
    paths = sorted(path for path in Path(folder).iterdir() if path.is_file()) if Path(folder).is_dir() else []
    stats = ((path.name, path.stat()) for path in paths)
    return _tokenizer_in(folder, tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats))


def tokens_of_class(folder: str) -> Mapping[str, str] | None:
    """Return the special tokens by name of the tokenizer that transformers makes from a local folder, class defaults
    included; None if it makes none.
    """
    loaded = tokenizer_of_class(folder)
    if loaded is None:
        return None
    return {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}


def _labels(config: Any) -> tuple[str, ...]:
    named = getattr(config, "id2label", None) or {}
    labels = tuple(str(named[number]) for number in sorted(named))
    if sorted(named) != list(range(len(named))) or all(GENERIC.fullmatch(label) for label in labels):
        return ()
    return labels

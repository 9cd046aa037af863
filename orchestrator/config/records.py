"""Records: rows of named columns, for objectives that read more than a text. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workloads.own.object_reference import is_object_reference


class Columns(NamedTuple):
    """The columns that an objective reads: required ones (or an alternative set), and optional ones.

    others: whether columns of any other name are read, too.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    others: bool = False


PROMPT = "prompt"
COMPARED = ("dpo", "ipo", "orpo", "reward")
"""Objectives that compare two answers."""
REFERENCED = ("dpo", "ipo", "kto")
"""Objectives that compare the model with a reference: the run's initial model."""
PREFERENCES = (*COMPARED, "kto")
"""Objectives that learn from people's preferences between answers."""
REWARDED = ("grpo", "reinforce")
"""Objectives that learn from rewards for answers that the model generates."""
OF_ANSWERS = (*PREFERENCES, *REWARDED)
"""Objectives whose loss is about whole answers, given or generated."""
TALKING = ("conversation", *OF_ANSWERS)
"""Objectives that learn from conversations, or may do so."""
SAMPLES = "samples"
"""The objective of own samples, whose loss is computed by the model."""
FRAMED = frozenset({"causal_lm", *TALKING})
"""Objectives whose prepared data has the tokenizer's special tokens around each text."""
OF_CLASSES = (
    *("sequence_classification", "multi_label_classification", "regression", "token_classification"),
    *("span_extraction", "sentence_embeddings"),
)
"""Objectives whose logits are not over a vocabulary."""
COLUMNS: Mapping[str, Columns] = {
    "sequence_classification": Columns(("text", "label"), ("pair",)),
    "multi_label_classification": Columns(("text", "labels"), ("pair",)),
    "regression": Columns(("text", "label"), ("pair",)),
    "token_classification": Columns(("words", "labels")),
    "span_extraction": Columns(("question", "context", "answer", "start")),
    "sentence_embeddings": Columns(("anchor", "positive"), ("negative",)),
    "seq2seq": Columns(("source", "target")),
    "conversation": Columns(("messages",), ("tools",), ("prompt", "completion")),
    **dict.fromkeys(COMPARED, Columns(("chosen", "rejected"), (PROMPT, "tools"))),
    "kto": Columns(("prompt", "completion", "label"), ("tools",), ("messages", "label")),
    **dict.fromkeys(REWARDED, Columns((PROMPT,), ("tools",), others=True)),
}
"""The columns of each objective, by its name. Objectives that are missing here read text."""
WITHOUT_SENTINELS = frozenset(
    {
        *("causal_lm", "masked_lm", "whole_word_masking", "span_masking", "entity_masking", "next_sentence"),
        *("sentence_order", "replaced_token_detection", "translation_lm", "permuted_lm", "unified_lm"),
        *("denoising", "mass", "gap_sentences"),
        *COLUMNS,
    }
)
"""Objectives that need only the standard special tokens. Listed here so that existing prepared data is found without
importing the objectives, which takes seconds.
"""
OBJECTIVES = WITHOUT_SENTINELS | {"span_corruption", "blank_infilling", SAMPLES}
"""All objectives of this project, and that of own samples. Listed here, because importing them takes seconds."""
LABELS = ("label", "labels")
"""The names of an objective's label columns."""
LABELLED = ("sequence_classification", "multi_label_classification", "token_classification")
"""Objectives that predict a label."""


def is_known(objective: str) -> bool:
    """Return whether an objective is one of this project or, by its form module:name, the user's own."""
    return objective in OBJECTIVES or is_object_reference(objective)


def may_be_null(objective: str, name: str) -> bool:
    """Return whether a column may be null. For a question without an answer these are the answer and its start."""
    if objective == "span_extraction":
        return name in ("answer", "start")
    if objective not in COLUMNS:
        return False
    columns = COLUMNS[objective]
    return name in columns.optional or (columns.others and name not in columns.needed)


def problem_of(objective: str, field: object) -> str:
    """Return why a source's `field` does not fit the objective, or an empty text if it fits."""
    columns = COLUMNS.get(objective)
    if not is_known(objective):
        return ""  # it is refused by its name
    if columns is None:
        return f"names columns, and {objective} reads text; give one key" if isinstance(field, dict) else ""
    ways = [way for way in (columns.needed, columns.instead) if way]
    named = " or ".join("{" + ", ".join(f"{name}: <column>" for name in way) + "}" for way in ways)
    if not isinstance(field, dict) and columns.others:
        return f"says not what {objective} reads; give {named[:-1]}, ...}} with the columns that rewards read"
    if not isinstance(field, dict) and PROMPT in columns.optional:
        alone = "without prompt where both are conversations that begin with it"
        return f"says not what {objective} reads; give {{{PROMPT}: <column>, {named[1:]}, {alone}"
    if not isinstance(field, dict):
        return f"says not what {objective} reads; give {named}"
    is_instead = ({*columns.instead} - {*columns.needed}) & field.keys()
    needed = columns.instead if is_instead else columns.needed
    if missing := [name for name in needed if name not in field]:
        return f"lacks {', '.join(missing)}, which {objective} reads; give {named}"
    unknown = [name for name in field if name not in (*needed, *columns.optional)]
    if unknown and not columns.others:
        return f"has {', '.join(unknown)}, which {objective} does not read; leave it out"
    return ""


def worker_kind(objective: str) -> str:
    """Return what workers beside the training workers are called: "rollout" or "teacher" workers."""
    return "rollout" if objective in REWARDED else "teacher"

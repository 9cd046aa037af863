"""Records: rows of named columns, where an objective reads more than a text. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Columns(NamedTuple):
    """What an objective reads of a row: the columns that it needs, or others instead, and those that a row may have."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()


PROMPT = "prompt"
COMPARED = ("dpo", "ipo", "orpo", "reward")
"""Objectives that compare two answers."""
REFERENCED = ("dpo", "ipo", "kto")
"""Objectives that compare the model with a reference, which is the model that the run begins with."""
PREFERENCES = (*COMPARED, "kto")
"""Objectives that read which answers people prefer."""
FRAMED = frozenset({"causal_lm", "conversation", *PREFERENCES})
"""Objectives in whose prepared data what the tokenizer puts around a text stands around each text."""
OF_CLASSES = ("sequence_classification", "regression", "token_classification", "span_extraction")
"""Objectives whose logits are not of a vocabulary."""
COLUMNS: Mapping[str, Columns] = {
    "sequence_classification": Columns(("text", "label"), ("pair",)),
    "regression": Columns(("text", "label"), ("pair",)),
    "token_classification": Columns(("words", "labels")),
    "span_extraction": Columns(("question", "context", "answer", "start")),
    "seq2seq": Columns(("source", "target")),
    "conversation": Columns(("messages",), ("tools",), ("prompt", "completion")),
    **dict.fromkeys(COMPARED, Columns(("chosen", "rejected"), (PROMPT, "tools"))),
    "kto": Columns(("prompt", "completion", "label"), ("tools",)),
}
"""By the objective's name. Objectives that are not here read text."""
WITHOUT_SENTINELS = frozenset(
    {
        *("causal_lm", "masked_lm", "whole_word_masking", "span_masking", "entity_masking", "next_sentence"),
        *("sentence_order", "replaced_token_detection", "translation_lm", "permuted_lm", "unified_lm"),
        *("denoising", "mass", "gap_sentences"),
        *COLUMNS,
    }
)
"""Objectives that need no special tokens beyond the standard set: known here, so that data that is prepared already is
found without the seconds that the objectives take to import."""
LABELLED = ("sequence_classification", "token_classification")
"""Objectives that predict one of some labels."""


def may_be_null(objective: str) -> tuple[str, ...]:
    """What of a row may be null: a question without an answer has neither that nor its start."""
    if objective == "span_extraction":
        return ("answer", "start")
    return COLUMNS[objective].optional if objective in COLUMNS else ()


def problem_of(objective: str, field: object) -> str:
    """Why `field` of a source does not say what the objective reads; empty if it does."""
    columns = COLUMNS.get(objective)
    if columns is None:
        return f"names columns, and {objective} reads text; give one key" if isinstance(field, dict) else ""
    ways = [way for way in (columns.needed, columns.instead) if way]
    named = " or ".join("{" + ", ".join(f"{name}: <column>" for name in way) + "}" for way in ways)
    if not isinstance(field, dict) and PROMPT in columns.optional:
        alone = "without prompt where both are conversations that begin with it"
        return f"says not what {objective} reads; give {{{PROMPT}: <column>, {named[1:]}, {alone}"
    if not isinstance(field, dict):
        return f"says not what {objective} reads; give {named}"
    needed = columns.instead if {*columns.instead} & field.keys() else columns.needed
    if missing := [name for name in needed if name not in field]:
        return f"lacks {', '.join(missing)}, which {objective} reads; give {named}"
    if unknown := [name for name in field if name not in (*needed, *columns.optional)]:
        return f"has {', '.join(unknown)}, which {objective} does not read; leave it out"
    return ""

"""The unit of an objective's loss, and what the loss is averaged over."""

from __future__ import annotations

from typing import Literal

from orchestrator.config.records import COLUMNS, COMPARED, REWARDED, SAMPLES

Counted = Literal["token", "record", "pair", "answer", "sample"]
_OF_TOKENS = ("token_classification", "seq2seq", "conversation")
"""Objectives that read records and predict tokens in them."""
_NO_NATS = ("regression", "ipo", "kto", *REWARDED, SAMPLES)
"""Objectives whose loss is not a negative log-probability, but a square, a share, or the user's own."""


def counted(objective: str) -> Counted:
    """Return what an objective's loss is averaged over."""
    if objective == SAMPLES:
        return "sample"
    if objective in COMPARED:
        return "pair"
    if objective in REWARDED:
        return "answer"
    return "record" if objective in COLUMNS and objective not in _OF_TOKENS else "token"


def loss_unit(objective: str) -> str:
    """Return the unit of an objective's loss, such as "nats per token"."""
    return f"{'' if objective in _NO_NATS else 'nats '}per {counted(objective)}"


def read_unit(objective: str) -> str:
    """Return the unit of a model's input, in which its speed is reported. Records and pairs are counted in tokens."""
    return "samples" if objective == SAMPLES else "tokens"


def predicts_text(objective: str) -> bool:
    """Return whether the loss is that of all tokens of a text, which the entropy of its unigrams can be compared
    with.

    Records predict only a part of their tokens, whose distribution differs.
    """
    return objective != SAMPLES and objective not in COLUMNS

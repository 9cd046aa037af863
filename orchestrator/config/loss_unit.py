"""What an objective counts: of what its loss is a mean, and in which unit that is told."""

from __future__ import annotations

from typing import Literal

from orchestrator.config.evaluate import SAMPLES
from orchestrator.config.records import COLUMNS, COMPARED

Counted = Literal["token", "record", "pair", "sample"]
_OF_TOKENS = ("token_classification", "seq2seq", "conversation")
"""Objectives that read records and predict tokens of them."""
_NO_NATS = ("regression", "ipo", "kto", SAMPLES)
"""Objectives whose loss is a square, a share, or the user's own, and no logarithm of a probability."""


def counted(objective: str) -> Counted:
    """Of what the loss of an objective is a mean."""
    if objective == SAMPLES:
        return "sample"
    if objective in COMPARED:
        return "pair"
    return "record" if objective in COLUMNS and objective not in _OF_TOKENS else "token"


def loss_unit(objective: str) -> str:
    """The unit of that loss, as in "nats a token"."""
    return f"{'' if objective in _NO_NATS else 'nats '}a {counted(objective)}"


def read_unit(objective: str) -> str:
    """What a model reads, and its speed is told in; records and pairs are read as tokens."""
    return "samples" if objective == SAMPLES else "tokens"


def predicts_text(objective: str) -> bool:
    """Whether the loss is that of the tokens of a text, which the entropy of its unigrams can be set against. Of
    records only a part is predicted, whose tokens are distributed otherwise."""
    return objective != SAMPLES and objective not in COLUMNS

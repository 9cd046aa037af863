"""What a pretrained folder means beyond its weights: which number is which label, and how a text begins and ends.

A forward pass reads none of this, so a mistake here shows up only as wrong results. Training, evaluation, prompts and
export all read it from here, and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from workloads.hf.hf_config import AnyMethod, FolderConfig, read_hf_config

GENERIC = re.compile(r"LABEL_\d+")
"""The names that transformers gives to labels that nobody named."""


@dataclass(frozen=True)
class FolderMeaning:
    """What the configuration files of a pretrained folder say about labels and tokens.

    Attributes:
        labels: the label of each row of the classification head, in the head's order; empty if the folder names none.
        problem_type: the loss of the classification head, by transformers' name; None if the folder does not say.
    """

    labels: tuple[str, ...] = ()
    problem_type: str | None = None


def folder_meaning(folder: str, kept: FolderConfig | None = None) -> FolderMeaning:
    """Read what the folder (or its config.json) means, by the configuration that a run has `kept`, if there is one.
    Raises WorkloadError if transformers cannot read it."""
    config = read_hf_config(folder, quantised=AnyMethod(), kept=kept)
    return FolderMeaning(labels=_labels(config), problem_type=getattr(config, "problem_type", None))


def _labels(config: Any) -> tuple[str, ...]:
    named = getattr(config, "id2label", None) or {}
    labels = tuple(str(named[number]) for number in sorted(named))
    return () if all(GENERIC.fullmatch(label) for label in labels) else labels

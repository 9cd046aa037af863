"""What a pretrained folder means beyond its weights: which number is which label, and how a text begins and ends.

A forward pass reads none of this, so a mistake here shows up only as wrong results. Training, evaluation, prompts and
export all read it from here, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workloads.errors import WorkloadError
from workloads.hf.hf_config import read_hf_config

if TYPE_CHECKING:
    from workloads.model.stored import StoredWeights

GENERIC = re.compile(r"LABEL_\d+")
"""The names that transformers gives to labels that nobody named."""
PROBLEMS: Mapping[str, str] = MappingProxyType(
    {"sequence_classification": "single_label_classification", "regression": "regression"}
)
"""transformers' name of the loss of each objective that trains a head of whole texts."""
LABELLED = ("sequence_classification", "token_classification")
"""Objectives that predict one of some labels."""
SHOWN = 8
"""Most labels that a line names."""
BY_NAME = 6
"""From which rule on a run compares the labels of a head by name; see `workloads.objectives.sampled.RULE`."""


@dataclass(frozen=True)
class FolderMeaning:
    """What the configuration files of a pretrained folder say about labels and tokens.

    Attributes:
        labels: the label of each row of the classification head, in the head's order; empty if the folder names none.
        problem_type: the loss of the classification head, by transformers' name; None if the folder does not say.
    """

    labels: tuple[str, ...] = ()
    problem_type: str | None = None


def folder_meaning(folder: str) -> FolderMeaning:
    """Read what the folder (or its config.json) means. Raises WorkloadError if transformers cannot read it."""
    config = read_hf_config(folder, quantised=_Anything())
    return FolderMeaning(labels=_labels(config), problem_type=getattr(config, "problem_type", None))


def rows_of_labels(
    theirs: Sequence[str], ours: Sequence[str], where: str, is_folder: bool = True
) -> tuple[int, ...]:
    """The row of a head at `where` that predicts each of `ours`; `theirs` are the labels of its rows, empty if nobody
    named them. Raises WorkloadError if they are others."""
    theirs = _named(theirs, ours)
    if not theirs or not ours:
        return tuple(range(len(ours)))
    if sorted(theirs) != sorted(ours):
        strange = [label for label in ours if label not in theirs] or ours
        renamed = ", or rename them in id2label of its config.json if they mean the same" if is_folder else ""
        raise WorkloadError(
            f"the head of {where} predicts {_listed(theirs)}, and data.labels names {_listed(strange)}; "
            f"name the head's labels in data.labels, in any order{renamed}"
        )
    return tuple(theirs.index(label) for label in ours)


def _named(theirs: Sequence[str], ours: Sequence[str]) -> Sequence[str]:
    """The labels of a head's rows; those that transformers gives by number, where `ours` are such and nobody named
    them."""
    if theirs or not all(GENERIC.fullmatch(label) for label in ours):
        return theirs
    return [f"LABEL_{number}" for number in range(len(ours))]


def compares_labels(objective: Any) -> bool:
    """Whether an objective trains a head whose labels, or whose problem, have names to compare."""
    return objective.name in (*PROBLEMS, *LABELLED) and getattr(objective, "rule", BY_NAME) >= BY_NAME


def by_label(
    weights: StoredWeights,
    theirs: FolderMeaning,
    objective: str,
    labels: Sequence[str],
    where: str,
    is_folder: bool = True,
) -> StoredWeights:
    """Weights at `where` whose head predicts these labels in this order; `theirs` is what the head there means. A head
    that begins anew, or whose labels nobody named, stays as it is.

    Raises WorkloadError if the head predicts other labels, or was trained for another problem than the objective's.
    """
    from workloads.model.stored import OUTPUT, ReorderedHead

    if objective not in (*PROBLEMS, *LABELLED) or weights.find(OUTPUT[0]) is None:
        return weights
    check_problem(theirs.problem_type, objective, where)
    rows = rows_of_labels(theirs.labels, labels, where, is_folder)
    return ReorderedHead(weights, rows, notes_of_labels(theirs.labels, labels, where))


def notes_of_labels(theirs: Sequence[str], ours: Sequence[str], where: str) -> tuple[str, ...]:
    """A line if the rows of a head are put in the order of `ours`, or nobody has said what they are."""
    theirs = _named(theirs, ours)
    if not theirs and ours:
        return (f"nobody named the labels of {where}: its rows are taken for {_listed(ours)}, in this order",)
    if ours and list(theirs) != list(ours):
        return (f"the head of {where} predicts {_listed(theirs)}: its rows follow data.labels by name",)
    return ()


def names_of_outputs(labels: Sequence[str], theirs: FolderMeaning, classes: int) -> list[str]:
    """The names of a head's outputs in an export: the labels, else those of the folder that the model is of."""
    if not labels and len(theirs.labels) == classes:
        return list(theirs.labels)
    return list(labels) or [f"LABEL_{number}" for number in range(classes)]


def check_problem(problem_type: str | None, objective: str, where: str) -> None:
    """Raise WorkloadError if the head at `where` was trained for another problem than that of the objective."""
    wanted = PROBLEMS.get(objective)
    if wanted is None or problem_type in (None, wanted):
        return
    raise WorkloadError(
        f"the head of {where} was trained for {problem_type}, and {objective} trains {wanted}; give another "
        "checkpoint, or remove problem_type from its config.json if its outputs mean that"
    )


def _listed(labels: Sequence[str]) -> str:
    """The first labels of some."""
    return ", ".join(labels[:SHOWN]) + (", ..." if len(labels) > SHOWN else "")


def _labels(config: Any) -> tuple[str, ...]:
    named = getattr(config, "id2label", None) or {}
    labels = tuple(str(named[number]) for number in sorted(named))
    if sorted(named) != list(range(len(named))) or all(GENERIC.fullmatch(label) for label in labels):
        return ()
    return labels


class _Anything:
    """Contains everything: meaning does not depend on how weights are quantised."""

    def __contains__(self, _: object) -> bool:
        return True

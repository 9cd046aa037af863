"""Check that an objective exists, and that the model and the sources have what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.errors import InputError
from orchestrator.config.records import SAMPLES
from orchestrator.data.config import Source


def check_objective(name: str, model: str, architecture: str, sources: Sequence[tuple[str, Source]]) -> None:
    """Check that the objective trains models of this architecture, and that the sources have its inputs.

    Args:
        name: the objective.
        model: the name of the model.
        architecture: its architecture.
        sources: all sources, with their keys in the job file.

    Raises:
        InputError: the objective does not exist, or something does not fit.
    """
    from workloads import objectives

    if name == SAMPLES:
        return
    if architecture != "own" and architecture not in objectives.architectures(name):
        fitting = [n for n in objectives.NAMES if architecture in objectives.architectures(n)]
        article = "an" if architecture[0] in "aeiou" else "a"
        problem = f"{name} does not train {model}, which is {article} {architecture}"
        raise InputError(problem, "workload.objective", f"choose from {', '.join(fitting)}")
    for where, source in sources:
        if objectives.reads_pairs(name) and isinstance(source.field, str):
            hint = "give two keys, those of the text and of its translation"
            raise InputError(f"{name} reads pairs", f"{where}.field", hint)

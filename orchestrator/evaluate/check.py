"""Check the tasks on which a job evaluates its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.evaluate.config import EvaluateSpec


def check_tasks(evaluate: EvaluateSpec | None, set_names: Sequence[str], workload: Any) -> None:
    """Check that the task files and their data exist, that lm-eval is installed, and that it can evaluate the model.

    Args:
        evaluate: what the job evaluates; None for nothing.
        set_names: the names of its sets of held-out text.
        workload: its model and objective.

    Raises:
        InputError: something is missing, or does not fit.
    """
    from orchestrator.evaluate.task_files import check_fits, read_tasks

    if evaluate and evaluate.tasks:
        tasks = read_tasks(evaluate.tasks, set_names, "evaluate.tasks")
        check_fits(workload, tasks, "evaluate.tasks")

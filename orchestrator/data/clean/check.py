"""Check the cleaning steps of a job."""

from __future__ import annotations

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS
from orchestrator.data.config import DataSpec


def check_cleaning(data: DataSpec, objective: str, has_adapter: bool) -> None:
    """Check that the objective reads text that can be cleaned, that each step has its inputs, and that added tokens are
    trained.

    Args:
        data: the job's data.
        objective: its objective.
        has_adapter: whether only an adapter is trained.

    Raises:
        InputError: something is missing, or does not fit.
    """
    from orchestrator.data.clean.plan import check_steps

    if data.clean and objective in COLUMNS:
        problem = f"cleans text, and {objective} reads records"
        raise InputError(problem, "data.clean", "leave it out, and clean the records before")
    check_steps(data)
    if data.add_tokens and has_adapter:
        hint = "leave them out, or train a base that has them first, without an adapter"
        raise InputError("an adapter does not train the rows of added tokens", "data.add_tokens", hint)

"""Check the sources of a job: they exist, hold text, and have the columns that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS, is_known, problem_of
from orchestrator.data.config import DataSpec, Source

if TYPE_CHECKING:
    from orchestrator.data.clean.config import CleanStep
    from orchestrator.data.sources import SourceFile


def check_sources(
    data: DataSpec,
    objective: str,
    held_out: Mapping[str, tuple[str, Sequence[Source]]],
    begins: bool = False,
) -> None:
    """Check that the sources exist, and that those of training hold at least one sequence.

    Args:
        data: the job's data.
        objective: its objective.
        held_out: the sets with their own text: by name, the key of the job file and the sources.
        begins: whether the data of a run begins. Then the columns that the sources name are checked too, see
            `check_columns`. A run that began without a column continues.

    Raises:
        InputError: a source is missing, empty, or lacks a column.
    """
    from orchestrator.data import sources

    if data.samples is not None:
        return
    check_own_rows_have_place(data)
    files = sources.resolve(data.sources, on_error=data.on_error)
    size = sum(file.plain_size for file in files)
    if not size:
        content = "rows" if objective in COLUMNS else "text"
        raise InputError("all files are empty", "data.sources", f"give files with {content}")
    if objective not in COLUMNS and size < data.sequence_length:  # a record is a sample, however short
        problem = f"the corpus has {size} bytes, fewer than one sequence of {data.sequence_length} tokens"
        raise InputError(problem, "data.sources", "give more text or lower data.sequence_length")
    for where, set_sources in held_out.values():
        check_set(set_sources, where, data.on_error, objective, begins)
    _check_rows(data.sources, files, "data.sources", objective, begins)
    if begins and data.clean:
        _check_columns_of_steps(data.clean, files)


def check_own_rows_have_place(data: DataSpec) -> None:
    """Check that the job names a folder for the rows that functions of the user make. Raises InputError."""
    if data.cache is None and any(source.own is not None for source in data.sources):
        problem = "is unset, and rows of `own` are written there"
        raise InputError(
            problem, "data.cache", "give a folder that all nodes see; on one machine, any folder"
        )


def _check_columns_of_steps(steps: Sequence[CleanStep], files: Sequence[SourceFile]) -> None:
    from orchestrator.data.clean.config import columns_of_steps
    from orchestrator.data.sources import part_size
    from orchestrator.data.sources.named_columns import check_columns_of_steps, first_parts

    if all(file.kind != ".arrow" for file in files):  # finding its rows reads the whole file
        check_columns_of_steps(first_parts(files, part_size(files)), columns_of_steps(steps))


def check_set(
    source_configs: Sequence[Source], where: str, on_error: str, objective: str, begins: bool
) -> None:
    """As `check_sources`, for held-out text with the key `where`. `on_error` says what to do with a bad row."""
    from orchestrator.data import sources

    files = sources.resolve(source_configs, where, on_error)
    if not any(file.size for file in files):
        raise InputError("all files are empty", where, "give files with text")
    _check_rows(source_configs, files, where, objective, begins)


def _check_rows(
    source_configs: Sequence[Source], files: Sequence[SourceFile], where: str, objective: str, begins: bool
) -> None:
    """Check that the first row of the sources at the key `where` can be read and, if data `begins`, has the columns."""
    if not is_known(objective) or any(problem_of(objective, source.field) for source in source_configs):
        return  # another check refuses it
    from orchestrator.data.sources import part_size
    from orchestrator.data.sources.documents import check_beginning
    from orchestrator.data.sources.named_columns import check_columns, first_parts

    check_beginning(files)
    if begins:
        looked_at = [file for file in files if file.kind != ".arrow"]  # finding its rows reads the whole file
        check_columns(first_parts(looked_at, part_size(files)), where, objective)

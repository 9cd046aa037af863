"""How the rows of an objective become records, and the check that a job names all that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS, LABELLED, TALKING, is_known, problem_of
from orchestrator.data.config import DataSpec, Source
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.data.store.manifest import RECORDS_FORMAT

if TYPE_CHECKING:
    from orchestrator.data.prepare.records import RecordKind

EARLIER = 5
"""The last format without special tokens around texts, and with special tokens from a single file."""


def kind_of(data: DataSpec, objective: str, data_format: int = RECORDS_FORMAT) -> RecordKind | None:
    """Return how the job's rows become records of prepared data of `data_format`; None if its objective reads text.

    Raises InputError.
    """
    location = data.tokenizer
    if objective not in COLUMNS:
        return None
    from orchestrator.data.prepare.chat_template import (
        asks_for_day,
        check_tokens,
        dated,
        find_template,
        find_tool_template,
    )
    from orchestrator.data.prepare.records import RecordKind

    if not isinstance(location, str) or objective not in TALKING:
        return RecordKind(objective, tuple(data.labels))
    template_reference = data.chat_template
    day = data.chat_date
    template = find_template(location, template_reference, data_format)
    if template and data_format > EARLIER:
        check_tokens(template, location)
    # the rows of other objectives may be plain texts, which need no template
    if template is None and objective == "conversation":
        raise InputError(
            "has no chat template", f"data.tokenizer {location}", "name a Jinja file in data.chat_template"
        )
    if template is None:
        return RecordKind(objective)
    with_tools = find_tool_template(location, template_reference)
    only_tools_ask = asks_for_day(with_tools) and not asks_for_day(template[0])
    text, tokens = dated(template, None if only_tools_ask else day)
    with_tools, _ = dated((with_tools, tokens), day if asks_for_day(with_tools) else None)
    return RecordKind(objective, (), text, tokens, with_tools)


def check_records(data: DataSpec, name: str, sources: Sequence[tuple[str, Source]]) -> None:
    """Check that every source names the columns of the objective, that labels have names, and that a needed chat
    template exists.

    Args:
        data: the job's data.
        name: its objective.
        sources: all sources, with their keys in the job file.

    Raises:
        InputError: something is missing, or is of no use.
    """
    if not is_known(name):
        return  # an objective that does not exist is refused with the nearest one
    for where, source in sources:
        if problem := problem_of(name, source.field):
            raise InputError(problem, f"{where}.field")
    labels = data.labels
    if name in LABELLED and (len(labels) < 2 or len(set(labels)) < len(labels)):
        raise InputError(
            f"{name} predicts one of at least two labels", "data.labels", "name each of them once"
        )
    if labels and name not in LABELLED:
        raise InputError(f"{name} predicts no labels", "data.labels", "leave it out")
    if name in COLUMNS and isinstance(data.tokenizer, TrainedTokenizer):
        hint = "name that of the model, or train one on text first"
        raise InputError(
            f"{name} reads records, and a tokenizer cannot be trained on records", "data.tokenizer", hint
        )
    kind = kind_of(
        data, name, EARLIER
    )  # the run may have started under a version with fewer checks of templates
    if data.chat_date is not None and not (kind and kind.template):
        raise InputError(
            "this job uses no chat template that could ask for a date", "data.chat_date", "leave it out"
        )

"""The token shards of prepared data, made as Ray tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.data import sources
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.prepare import reuse, shards
from orchestrator.data.prepare.rejections import Ceiling
from orchestrator.data.prepare.shards import TokenFormat
from orchestrator.data.progress import Progress
from orchestrator.data.samples.sections.publisher import Publisher
from orchestrator.data.sources import Part
from orchestrator.data.sources.lines import reach_of
from orchestrator.data.store.data_folder import DataFolder

ShardTasks = tuple[Callable[[dict[str, Any]], Callable[[], None] | None], Callable[[dict[str, Any]], bool]]


def shard_tasks(
    uri: str, written: TokenFormat, tokenizer_json: str, fast: bool, text: CleanedText | None
) -> ShardTasks:
    """Return the function that makes the shard of a row from its text, and the function that says whether the shard
    exists. Both are sent to other processes.
    """

    def task(row: dict[str, Any]) -> Callable[[], None] | None:
        if row["there"]:
            source, number = row["there"]
            if reuse.copy_shard(source, number, DataFolder(uri), row["number"], written.version):
                return None
        part = sources.from_json(row["part"])
        return shards.make_shard(
            uri, row["number"], part=part, written=written, fast=fast, cleaned=text, text=tokenizer_json
        )

    def is_there(row: dict[str, Any]) -> bool:
        # a record from before belongs to files that are missing
        if row["recorded"]:
            return False
        return shards.read_record(DataFolder(uri), row["number"], written.version) is not None

    return task, is_there


def write_shards(
    folder: DataFolder,
    parts: list[Part],
    written: TokenFormat,
    *,
    tasks: ShardTasks,
    publisher: Publisher | None,
    existing: Mapping[int, tuple[str, int]],
    leave: float,
    ceiling: Ceiling,
    progress: Progress,
) -> None:
    """Write the shards that lack a record or a file.

    Args:
        folder: the prepared data.
        parts: the parts of the text, one shard each.
        written: the format of the shards.
        tasks: see `shard_tasks`.
        publisher: for streamed data: write only the shards of its sections, in their order, and let it publish them.
        existing: shards to copy, by number.
        leave: CPUs to leave for others.
        ceiling: how much may be left out.
        progress: see `prepare`.

    Raises:
        InputError: more is left out than the job allows.
    """
    todo = shards.unfinished(folder, len(parts), written)
    from orchestrator.data.prepare.part_tasks import (  # only here: complete data is used without Ray
        run_tasks,
        together,
    )

    task, is_there = tasks
    refuted = None
    wanted = publisher.parts if publisher else range(len(parts))
    text_bytes = sum(span.bytes for number in wanted for span in parts[number])
    # one part a task if sections are to be published early
    max_tasks = 1 if publisher else together(text_bytes // max(len(parts), 1))
    # One more round for shards of an engine that later differed from the reference.
    while refuted != (refuted := shards.refuted_engine(folder)):
        if refuted:
            todo = shards.unfinished(folder, len(parts), written)
        if publisher:
            publisher.look(todo)
            todo = publisher.order(todo)
        before = len(wanted) - len(todo)
        progress("tokens", before, len(wanted), text_bytes)
        recorded = folder.sizes("records")
        rows = [
            {
                "number": n,
                "recorded": os.path.basename(shards.record_name(n)) in recorded,
                "part": sources.to_json(parts[n], reach_of(written.version)),
                "there": existing.get(n, ()) and list(existing[n]),
            }
            for n in todo
        ]
        for done in run_tasks(
            task, rows, cache=folder.uri, leave=leave, together=max_tasks, is_done=is_there
        ):
            if ceiling.limited:
                number = todo[done - 1]
                ceiling.check(number, shards.read_record(folder, number, written.version), parts)
            if publisher:
                publisher.look(todo[done:])
            progress("tokens", before + done, len(wanted), text_bytes)

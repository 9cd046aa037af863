"""Divide files into parts. One task makes one shard of each part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow.parquet as pq

from orchestrator.config.errors import InputError
from orchestrator.data.sources.arrow_files import batch_ends, schema_of
from orchestrator.data.sources.files import TABLES, VANISHED, Part, SourceFile, Span, opened
from orchestrator.data.sources.json_rows import begins_list
from orchestrator.data.sources.kinds import UNDIVIDED
from orchestrator.data.sources.table_rows import ERRORS, top_level
from orchestrator.data.store.manifest import FORMAT

PARTS = 64
PART_BYTES = (2**20, 2**25)
"""Minimum and maximum bytes of a part: enough that starting a task is cheap, and little enough for one core's memory.
"""

BEGINNING = 2**16
"""Bytes of a file that are read to see whether it holds a list."""


def part_size(files: Sequence[SourceFile]) -> int:
    """Return the bytes of a part for these files: about PARTS parts, within PART_BYTES."""
    min_bytes, max_bytes = PART_BYTES
    return min(max_bytes, max(min_bytes, sum(file.plain_size for file in files) // PARTS))


def cut(files: Sequence[SourceFile], part_bytes: int, data_format: int = FORMAT) -> list[Part]:
    """Divide all files into parts of about `part_bytes`: large files are cut, small files of a source combined.

    A compressed file, a .csv, a .tar and a list in a .json cannot be cut. Raises InputError for a .parquet or .arrow
    file that is damaged or lacks the field, if its policy is to fail.
    """
    parts: list[Part] = []
    pending: list[Span] = []
    size = 0
    for file in files:
        for span in _spans(file, part_bytes, data_format):
            if pending and (size + span.bytes > part_bytes or pending[0].file.source != file.source):
                parts.append(tuple(pending))
                pending = []
                size = 0
            pending.append(span)
            size += span.bytes
    return [*parts, tuple(pending)] if pending else parts


def _spans(file: SourceFile, part_bytes: int, data_format: int) -> list[Span]:
    if file.content == VANISHED:
        return [Span(file, 0, 0, 0)]
    if file.kind in TABLES:
        return _whole_rows(file, part_bytes)
    if file.compression or file.kind in UNDIVIDED:
        return [Span(file, 0, file.size, file.plain_size)]
    count = -(-file.size // part_bytes)
    if count > 1 and data_format > 5 and _is_list(file):
        return [Span(file, 0, file.size, file.size)]
    cuts = [file.size * i // count for i in range(count + 1)] if count else []
    return [Span(file, start, stop, stop - start) for start, stop in pairwise(cuts)]


def _is_list(file: SourceFile) -> bool:
    """Return whether a .json holds a list of objects instead of one object a line.

    Other line-based files are not opened, because there may be thousands on a store.
    """
    if file.kind != ".jsonl" or not file.uri.lower().endswith(".json"):
        return False
    with opened(Span(file, 0, file.size, file.size)) as handle:
        line = b"\n"
        while line and not line.strip():
            line = handle.readline(BEGINNING)
    return begins_list(line)


def _whole_rows(file: SourceFile, part_bytes: int) -> list[Span]:
    """Return spans that end with a row group of a .parquet file, or with a record batch of an .arrow file.

    Damaged parts form a separate span, whose reader reports them.
    """
    names: list[str] = []
    boundaries: list[
        tuple[int, int]
    ] = []  # where a group or batch may begin, and the number of rows before it
    sizes: list[int] = []
    damage = None
    with opened(Span(file, 0, file.size, file.size)) as handle:
        try:
            if file.kind == ".arrow":
                names = schema_of(handle).names
                for boundary in batch_ends(handle):
                    boundaries.append(boundary)
                sizes = [after - before for (before, _), (after, _) in pairwise(boundaries)]
            else:
                parquet = pq.ParquetFile(handle)
                names = parquet.schema_arrow.names
                meta = parquet.metadata
                sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
                boundaries = [(i, 0) for i in range(len(sizes) + 1)]
        except ERRORS as error:
            damage = error
            sizes = [after - before for (before, _), (after, _) in pairwise(boundaries)]
    if file.on_error == "fail":
        _refuse(file, names, damage)
    spans = []
    first = 0
    size_so_far = 0
    for number, size in enumerate(sizes):
        size_so_far += size
        if size_so_far >= part_bytes or number == len(sizes) - 1:
            (start, row), (stop, _) = boundaries[first], boundaries[number + 1]
            spans.append(Span(file, start, stop, size_so_far, row=row))
            first = number + 1
            size_so_far = 0
    if damage:
        start, row = boundaries[-1] if boundaries else (0, 0)
        spans.append(Span(file, start, file.size if file.kind == ".arrow" else 0, 0, row=row))
    return spans


def _refuse(file: SourceFile, names: list[str], damage: BaseException | None) -> None:
    """Raise InputError for a table that is damaged or lacks a needed column."""
    if damage:
        kind = "an Arrow" if file.kind == ".arrow" else "a parquet"
        problem = f"is not {kind} file ({' '.join(str(damage).split())[:200]})"
        raise InputError(problem, file.uri, "write the file again, or set data.on_error") from None
    for key in file.columns:
        if not top_level(names, [key]) and key not in file.folders:
            raise InputError(f"has no column '{key}'", file.uri, f"set field to one of {', '.join(names)}")

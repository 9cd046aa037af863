"""The division of files into parts, of which one task makes one shard each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow.parquet as pq

from orchestrator.data.sources.arrow_files import batch_ends, schema_of
from orchestrator.data.sources.files import Part, SourceFile, Span
from orchestrator.data.sources.verified import open_source
from orchestrator.job.errors import InputError

PARTS = 64
PART_BYTES = (2**20, 2**25)
"""Least and most bytes of a part: enough that starting a task is cheap, and little enough for one core's memory."""


def part_size(files: Sequence[SourceFile]) -> int:
    """Bytes of a part for these files: about PARTS of them, within PART_BYTES."""
    least, most = PART_BYTES
    return min(most, max(least, sum(file.size for file in files) // PARTS))


def cut(files: Sequence[SourceFile], part_bytes: int) -> list[Part]:
    """Divide all files into parts of about `part_bytes`: large files are cut, small ones of a source combined.

    Raises InputError for a .parquet or .arrow file that is damaged or lacks the field.
    """
    parts: list[Part] = []
    held: list[Span] = []
    for file in files:
        for span in _spans(file, part_bytes):
            full = sum(s.bytes for s in held) + span.bytes > part_bytes
            if held and (full or held[0].file.source != file.source):
                parts.append(tuple(held))
                held = []
            held.append(span)
    return [*parts, tuple(held)] if held else parts


def _spans(file: SourceFile, part_bytes: int) -> list[Span]:
    if file.kind in (".parquet", ".arrow"):
        return _whole_rows(file, part_bytes)
    if file.kind == ".csv":  # a line may end within a quoted value
        return [Span(file, 0, file.size, file.size)]
    count = -(-file.size // part_bytes)
    cuts = [file.size * i // count for i in range(count + 1)] if count else []
    return [Span(file, start, stop, stop - start) for start, stop in pairwise(cuts)]


def _whole_rows(file: SourceFile, part_bytes: int) -> list[Span]:
    """Spans that end with a row group of a .parquet file, or with a record batch of an .arrow file."""
    try:
        with open_source(file.uri, file.size, file.content, file.sums) as handle:
            if file.kind == ".arrow":
                names, ends = schema_of(handle).names, batch_ends(handle)
                sizes, places = [b - a for a, b in pairwise(ends)], ends
            else:
                parquet = pq.ParquetFile(handle)
                names, meta = parquet.schema_arrow.names, parquet.metadata
                sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
                places = list(range(len(sizes) + 1))
    except (OSError, ValueError) as error:
        kind = "an Arrow" if file.kind == ".arrow" else "a parquet"
        what = f"is not {kind} file ({' '.join(str(error).split())[:200]})"
        raise InputError(what, file.uri, "write the file anew") from None
    for key in file.fields:
        if key not in names and not (isinstance(file.field, dict) and key.split(".")[0] in names):
            raise InputError(f"has no column '{key}'", file.uri, f"set field to one of {', '.join(names)}")
    spans, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= part_bytes or number == len(sizes) - 1:
            spans.append(Span(file, places[first], places[number + 1], held))
            first, held = number + 1, 0
    return spans

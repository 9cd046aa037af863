"""The rows of .parquet and .arrow files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data.sources.arrow_files import batches
from orchestrator.data.sources.files import Span
from orchestrator.data.sources.rejected import Rejected, Unfit

BATCH_ROWS = 256
"""Rows of a .parquet file that are read at once."""
ERRORS = (OSError, ValueError, MemoryError, NotImplementedError, KeyError, TypeError)
"""What pyarrow raises for damaged files; errors of storage are ReadFailed."""

Found = Iterator[tuple[int, dict[str, Any]]]


def read(span: Span, file: BinaryIO, rejected: Rejected, _: int, columns: tuple[str, ...]) -> Found:
    """The rows of a span, of the columns that its fields and `columns` name. What of it is damaged is refused."""
    wanted = [*span.file.columns, *columns]
    reader = _arrow if span.file.kind == ".arrow" else _parquet
    yield from reader(span, file, wanted, rejected)


def top_level(names: list[str], wanted: list[str]) -> list[str]:
    """The columns of a table that hold what is `wanted`, of which some may be paths into them."""
    found = (name if name in names else name.split(".")[0].split("[")[0] for name in wanted)
    return sorted(set(found) & set(names))


def _parquet(span: Span, file: BinaryIO, wanted: list[str], rejected: Rejected) -> Found:
    try:
        table = pq.ParquetFile(file)
        names = top_level(table.schema_arrow.names, wanted)
        sizes = [table.metadata.row_group(group).num_rows for group in range(span.stop)]
    except ERRORS as error:
        rejected.refuse(span.file, _damaged("is not a parquet file", error))
        return
    for group in range(span.start, span.stop):
        row = sum(sizes[:group])
        if not names:
            yield from ((at, {}) for at in range(row, row + sizes[group]))
            continue
        stop = row + sizes[group]
        found = table.iter_batches(BATCH_ROWS, row_groups=[group], columns=names)
        while row < stop:
            try:
                batch = next(found)
                columns = {name: _values(batch.column(name)) for name in names}
            except (*ERRORS, StopIteration) as error:
                damage = _damaged(f"cannot be read from row {row + 1} on", error)
                rejected.refuse(span.file, damage, row, count=stop - row)
                break
            yield from _rows(row, batch.num_rows, columns)
            row += batch.num_rows


def _arrow(span: Span, file: BinaryIO, wanted: list[str], rejected: Rejected) -> Found:
    row, found = span.row, batches(file, span.start, span.stop)
    while True:
        try:
            batch = next(found, None)
            if batch is None:
                return
            names = top_level(batch.schema.names, wanted)
            columns = {name: _values(batch.column(name)) for name in names}
        except ERRORS as error:
            rejected.refuse(span.file, _damaged(f"cannot be read from row {row + 1} on", error), row)
            return
        yield from _rows(row, batch.num_rows, columns)
        row += batch.num_rows


def _rows(first: int, count: int, columns: dict[str, list[Any]]) -> Found:
    if not columns:
        yield from ((first + number, {}) for number in range(count))
        return
    names = tuple(columns)
    for number, values in enumerate(zip(*columns.values(), strict=True), first):
        yield number, dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """The values of a column; a text that is no UTF-8 as its bytes. Raises what is in ERRORS for a damaged one, which
    would otherwise be read from anywhere in memory."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        plain = column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
        plain.validate(full=True)
        try:
            texts: list[Any] = column.to_pylist()
            return texts
        except UnicodeDecodeError:
            column = plain
    else:
        column.validate(full=True)
    values: list[Any] = column.to_pylist()
    return [_text(value) if isinstance(value, bytes) else value for value in values]


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _damaged(what: str, error: BaseException) -> Unfit:
    return Unfit("damaged", f"{what} ({' '.join(str(error).split())[:200]})", "write the file anew")

"""The rows of .parquet and .arrow files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data.sources.arrow_files import batches, schema_of
from orchestrator.data.sources.files import Span, opened
from orchestrator.data.sources.rejected import Rejected, Unfit

BATCH_ROWS = 256
"""Rows of a .parquet file in one read."""
ERRORS = (OSError, ValueError, MemoryError, NotImplementedError, KeyError, TypeError)
"""pyarrow's errors for damaged files. Storage errors are ReadFailed."""

Found = Iterator[tuple[int, dict[str, Any]]]


def read(span: Span, file: BinaryIO, rejected: Rejected, data_format: int, columns: tuple[str, ...]) -> Found:
    """Yield the rows of a span with the columns that its fields and `columns` need. Damaged parts are refused."""
    wanted = [*span.file.columns, *columns]
    reader = _arrow if span.file.kind == ".arrow" else _parquet
    yield from reader(span, file, wanted, rejected, data_format)


def schema_in(span: Span) -> pa.Schema | None:
    """Return the schema of a table; None if it is damaged, which reading its rows reports."""
    with opened(span) as file:
        try:
            return schema_of(file) if span.file.kind == ".arrow" else pq.read_schema(file)
        except ERRORS:
            return None


def top_level(names: list[str], wanted: list[str]) -> list[str]:
    """Return the columns of a table that hold what is `wanted`, which may be paths into columns."""
    result = (name if name in names else name.split(".")[0].split("[")[0] for name in wanted)
    return sorted(set(result) & set(names))


def _parquet(span: Span, file: BinaryIO, wanted: list[str], rejected: Rejected, data_format: int) -> Found:
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
        batches_of_group = table.iter_batches(BATCH_ROWS, row_groups=[group], columns=names)
        while row < stop:
            try:
                batch = next(batches_of_group)
                columns = {name: values_of_column(batch.column(name), data_format) for name in names}
            except (*ERRORS, StopIteration) as error:
                damage = _damaged(f"cannot be read from row {row + 1} on", error)
                rejected.refuse(span.file, damage, row, count=stop - row)
                break
            yield from _rows(row, batch.num_rows, columns)
            row += batch.num_rows


def _arrow(span: Span, file: BinaryIO, wanted: list[str], rejected: Rejected, data_format: int) -> Found:
    row = span.row
    record_batches = batches(file, span.start, span.stop)
    while True:
        try:
            batch = next(record_batches, None)
            if batch is None:
                return
            names = top_level(batch.schema.names, wanted)
            columns = {name: values_of_column(batch.column(name), data_format) for name in names}
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


def values_of_column(column: pa.Array, data_format: int) -> list[Any]:
    """Return the values of a column. Text that is not valid UTF-8 is returned as bytes.

    Before format 6, a map is a list of pairs, and a JSON value is its text. Raises one of ERRORS for a damaged
    column, which would otherwise be read from arbitrary memory.
    """
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
    is_new = data_format > 5
    maps = {"maps_as_pydicts": "strict"} if is_new and _holds(kind, pa.types.is_map) else {}
    values: list[Any] = column.to_pylist(**maps)
    if is_new and _holds(kind, _is_json):
        values = [_decoded(value, kind) for value in values]
    return [_text(value) if isinstance(value, bytes) else value for value in values]


def _is_json(kind: pa.DataType) -> bool:
    """Return whether a type is JSON, as Hugging Face's feature `Json` is stored."""
    return isinstance(kind, pa.JsonType)


def _holds(kind: pa.DataType, sought: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type is of a sort, or contains one."""
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return sought(kind) or any(_holds(inner_kind, sought) for inner_kind in inner)


def _decoded(value: Any, kind: pa.DataType) -> Any:
    """Return a value with its JSON texts parsed. Raises ValueError."""
    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {key: _decoded(item, kind.item_type) for key, item in value.items()}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_decoded(item, kind.value_type) for item in value]
    return value


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _damaged(problem: str, error: BaseException) -> Unfit:
    return Unfit("damaged", f"{problem} ({' '.join(str(error).split())[:200]})", "write the file again")

"""Little of a job's text, for a rehearsal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.sources import SourceFile, cut, resolve
from orchestrator.data.sources.arrow_files import batches_in
from orchestrator.data.sources.dataset_card import write_card
from orchestrator.data.sources.documents import LOOK_BYTES
from orchestrator.data.sources.files import TABLES, Span, opened
from orchestrator.data.sources.json_rows import begins_list
from orchestrator.data.sources.listing import HIVE_NULL
from orchestrator.data.sources.plain import Plain
from orchestrator.data.sources.rows import Row, rows
from orchestrator.data.sources.table_rows import BATCH_ROWS, ERRORS, top_level

ENOUGH = 2 * 2**20
"""The approximate bytes of text that all sources of a list give together."""
LEAST = 2**17
"""The minimum bytes of text of each source."""


def excerpt(
    sources: Sequence[Source], where: str, on_error: str, folder: Path, enough: int = ENOUGH
) -> list[Source]:
    """Return sources with about `enough` bytes of the text of `sources`.

    A small file is read in place. The beginning of a larger one is copied to `folder`. `where` is the sources' key in
    the job file. Raises InputError if a source does not exist or cannot be read.
    """
    files = resolve(sources, where, on_error)
    budget = max(enough // max(len(sources), 1), LEAST)
    result = []
    for number, source in enumerate(sources):
        uris, remaining = [], budget
        for file in (file for file in files if file.source == number):
            if remaining <= 0:
                break
            if file.plain_size <= remaining:
                uris.append(file.uri)
                remaining -= file.plain_size
                continue
            if uris:
                break
            above = [f"{quote(name)}={_hive_value(value)}" for name, value in file.folders.items()]
            target = folder.joinpath(*above) / f"{where}.{number}{_suffix(file)}"
            if file.labels:
                target = folder.joinpath(f"{where}.{number}", *above) / target.name
                write_card(str(folder / f"{where}.{number}"), file.labels)
            _beginning(file, remaining, target)
            uris.append(str(target))
            break
        form = None if uris and uris[0].startswith(str(folder)) else source.format
        result.append(source.model_copy(update={"uri": uris or source.uri, "format": form}))
    return result


def _hive_value(value: str | None) -> str:
    """Return a value in Hive's form for folder names."""
    return HIVE_NULL if value is None else quote(value, safe="")


def _suffix(file: SourceFile) -> str:
    if file.kind in TABLES:
        return ".parquet"
    return ".jsonl" if file.kind == ".tar" else file.kind


def _beginning(file: SourceFile, size: int, target: Path) -> None:
    """Write the beginning of a file to `target`.

    This is the first `size` bytes of plain text, up to the end of a line; the first rows of a table, with its schema's
    metadata; or the first rows of an archive or a JSON list, as lines.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if file.kind in TABLES:
            pq.write_table(_first_rows(file, size), target)
            return
        if file.kind == ".tar":
            target.write_text("".join(_lines(file, size)))
            return
        with opened(Span(file, 0, file.size, file.size)) as raw:
            handle = cast(BinaryIO, Plain(raw, file.compression)) if file.compression else raw
            text = b"".join(_read(handle, size))
        if file.kind == ".jsonl" and begins_list(text):
            target.write_text("".join(_lines(file, size)))
            return
        end = text.rfind(b"\n") + 1
        if file.kind in (".csv", ".tsv"):  # their cells may hold line breaks
            begins = itertools.takewhile(lambda at: at <= len(text), (row.at for row in _rows(file)))
            end = max(begins, default=0)
        target.write_bytes(text[:end] or text)
    except OSError as error:
        raise InputError(f"cannot be read ({error})", file.uri, "check its permissions") from None


def _first_rows(file: SourceFile, size: int) -> pa.Table:
    """Return the first rows of a table up to this size, with only the columns that are read. Raises InputError."""
    result = []
    with opened(Span(file, 0, file.size, file.size)) as raw:
        try:
            batches = (
                batches_in(raw) if file.kind == ".arrow" else pq.ParquetFile(raw).iter_batches(BATCH_ROWS)
            )
            for batch in batches:
                names = top_level(batch.schema.names, list(file.columns))
                rows = batch.num_rows if batch.nbytes <= size else batch.num_rows * size // batch.nbytes
                result.append(batch.select(names).slice(0, max(rows, 1)))
                size -= batch.nbytes
                if size <= 0:
                    break
            return pa.Table.from_batches(result)
        except ERRORS as error:
            problem = f"cannot be read ({' '.join(str(error).split())[:200]})"
            raise InputError(problem, file.uri, "write the file again") from None


def _read(handle: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (block := handle.read(min(size, 2**16))):
        size -= len(block)
        yield block


def _rows(file: SourceFile) -> Iterator[Row]:
    return (row for part in cut([file], LOOK_BYTES) for span in part for row in rows(span))


def _lines(file: SourceFile, size: int) -> Iterator[str]:
    """Yield the first rows of an archive or a list as lines of JSON, up to this size."""
    for row in _rows(file):
        line = json.dumps(dict(row.values), default=_plain) + "\n"
        yield line
        size -= len(line)
        if size <= 0:
            return


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)

"""The files of the sources, and the spans of them that tasks read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.config.fields import columns_of
from orchestrator.data.sources.lines import LONGEST_SEPARATOR
from orchestrator.data.sources.verified import (
    BLOCK_BYTES,
    SUM_DIGITS,
    ReadFailed,
    check_unchanged,
    open_source,
)
from orchestrator.storage.retry import storage_failed, transient

TABLES = (".parquet", ".arrow")
"""Kinds whose spans are not made of lines."""
VANISHED = "vanished"
"""The content of a missing file, under a policy that continues without it."""


@dataclass(frozen=True)
class SourceFile:
    """One file of source number `source`.

    Attributes:
        content: identifies its bytes: their hash, or the ETag of a remote object.
        field: column of the text, of both texts of a pair, or of each input of a record by its name; empty for .txt.
        sums: for a local file, the checksums of its blocks, see `orchestrator.data.sources.verified`.
        compression: gz, bz2, xz or zst; empty if it is plain.
        on_error: what to do with unusable input: fail, skip or repair.
        copy: number of earlier files with the same text.
        folders: values of Hive-style folders above it, such as `lang=en/`, for the columns that its fields need; None
            for null. The file's own columns take precedence.
        labels: names of the labels in each of its label columns that a dataset card, and not its schema, names.
    """

    source: int
    uri: str
    kind: str
    size: int
    content: str
    field: str | tuple[str, str] | dict[str, str]
    sums: str = dataclasses.field(default="", repr=False)
    compression: str = ""
    on_error: str = "fail"
    copy: int = 0
    folders: dict[str, str | None] = dataclasses.field(default_factory=dict)
    labels: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the keys of a row's text, pair of texts or record."""
        if isinstance(self.field, dict):
            return tuple(self.field.values())
        return (self.field,) if isinstance(self.field, str) else tuple(self.field)

    @property
    def plain_size(self) -> int:
        """Return the approximate bytes of its text; compressed text takes a quarter."""
        return self.size * (4 if self.compression else 1)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns, and paths into columns, that its fields need."""
        return tuple(dict.fromkeys(column for field in self.fields for column in columns_of(field)))


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin within bytes [start, stop), the row groups [start, stop) of a .parquet file, or
    the record batches in these bytes of an .arrow file.

    `row` is the number of rows before it in an .arrow file. `sums`, if not empty, are the file's checksums from block
    `first` on, as many as the span may need.
    """

    file: SourceFile
    start: int
    stop: int
    bytes: int
    sums: str = ""
    first: int = 0
    row: int = 0


Part = tuple[Span, ...]
"""Consecutive spans of one source. One task makes one shard of it."""


def to_json(part: Part, reach: int | None = None) -> str:
    """Return the part as JSON, for a task on any node that reads at most `reach` bytes after its spans."""
    spans = (_with_sums(span, reach) for span in part)
    return json.dumps([{**vars(span), "file": vars(span.file)} for span in spans])


@contextmanager
def opened(span: Span) -> Iterator[BinaryIO]:
    """Open the file of a span and verify its blocks as they are read. Raises InputError if it has changed, even after
    everything was read.
    """
    file = span.file
    sums, first = (span.sums, span.first) if span.sums else (file.sums, 0)
    try:
        with open_source(file.uri, file.size, file.content, sums, first) as source:
            yield source
    except ReadFailed as failed:
        raise _named(failed.error, file.uri) from None
    check_unchanged(file.uri, file.size, file.content, sums)


def _named(error: Exception, uri: str) -> Exception:
    """Return a store client's error, which may lack the file's name, as an error with the name."""
    if isinstance(error, OSError) or not storage_failed(error):
        return error
    problem = f"cannot be read ({' '.join(str(error).split())})"
    if transient(error):
        return Unreachable(problem, uri, "check address and network")
    return InputError(problem, uri, "check its address and credentials, then run the same command again")


def _with_sums(span: Span, reach: int | None) -> Span:
    """Return the span with only the checksums that it needs."""
    file = span.file
    first = 0
    last = None
    if not (file.kind in TABLES or file.compression) and reach is not None:
        first = max(span.start - LONGEST_SEPARATOR, 0) // BLOCK_BYTES
        last = (span.stop + reach) // BLOCK_BYTES + 1
    sums = file.sums[first * SUM_DIGITS : None if last is None else last * SUM_DIGITS]
    return dataclasses.replace(span, file=dataclasses.replace(file, sums=""), sums=sums, first=first)


def from_json(text: str) -> Part:
    """Restore a part; the inverse of `to_json`."""
    return tuple(Span(**{**span, "file": SourceFile(**span["file"])}) for span in json.loads(text))

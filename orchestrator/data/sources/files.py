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
"""Kinds whose spans are not of lines."""
VANISHED = "vanished"
"""The content of a file that is named and not there, under a policy that goes on without it."""


@dataclass(frozen=True)
class SourceFile:
    """One file of source number `source`.

    Attributes:
        content: identifies its bytes: their hash, or the ETag of a remote object.
        field: key or column of the text, or of the two texts of a pair, or those of a record by what is read of it;
            empty for .txt.
        sums: for a local file the checksums of its blocks, see `orchestrator.data.sources.verified`.
        compression: what it is compressed by: gz, bz2, xz or zst; empty if it is plain.
        on_error: what is done about input that cannot be used: fail, skip or repair.
        copy: how many of the files before it have the same text.
        folders: what the folders above it say in the manner of Hive, as in `lang=en/`, of the columns that its fields
            name; None for a value that is null there. A column of its own comes before.
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

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of a row's text, pair of texts or record."""
        if isinstance(self.field, dict):
            return tuple(self.field.values())
        return (self.field,) if isinstance(self.field, str) else tuple(self.field)

    @property
    def plain_size(self) -> int:
        """Bytes of its text, about: text that is compressed takes a quarter."""
        return self.size * (4 if self.compression else 1)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, and paths into columns, of which its fields are made."""
        return tuple(dict.fromkeys(column for field in self.fields for column in columns_of(field)))


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin within bytes [start, stop), row groups [start, stop) of a .parquet file, or the
    record batches in these bytes of an .arrow file.

    `row` is how many rows of an .arrow file are before it. `sums`, if not empty, are the checksums of the file from
    block `first` on, as many as the span may need.
    """

    file: SourceFile
    start: int
    stop: int
    bytes: int
    sums: str = ""
    first: int = 0
    row: int = 0


Part = tuple[Span, ...]
"""Consecutive spans of one source; one task makes one shard of it."""


def to_json(part: Part, reach: int | None = None) -> str:
    """The part as JSON, for a task on any node that reads at most `reach` bytes after its spans."""
    spans = (_with_sums(span, reach) for span in part)
    return json.dumps([{**vars(span), "file": vars(span.file)} for span in spans])


@contextmanager
def opened(span: Span) -> Iterator[BinaryIO]:
    """The file of a span, its blocks checked as they are read. Raises InputError if it has changed, also after all was
    read."""
    file = span.file
    sums, first = (span.sums, span.first) if span.sums else (file.sums, 0)
    try:
        with open_source(file.uri, file.size, file.content, sums, first) as found:
            yield found
    except ReadFailed as failed:
        raise _named(failed.error, file.uri) from None
    check_unchanged(file.uri, file.size, file.content, sums)


def _named(error: Exception, uri: str) -> Exception:
    """An error of a store's client, which may not say what was read, as one that does."""
    if isinstance(error, OSError) or not storage_failed(error):
        return error
    what = f"cannot be read ({' '.join(str(error).split())})"
    if transient(error):
        return Unreachable(what, uri, "check address and network")
    return InputError(what, uri, "check its address and credentials; the same command goes on")


def _with_sums(span: Span, reach: int | None) -> Span:
    """The span with only those of its file's checksums that it needs."""
    file = span.file
    first = 0
    last = None
    if not (file.kind in TABLES or file.compression) and reach is not None:
        first = max(span.start - LONGEST_SEPARATOR, 0) // BLOCK_BYTES
        last = (span.stop + reach) // BLOCK_BYTES + 1
    sums = file.sums[first * SUM_DIGITS : None if last is None else last * SUM_DIGITS]
    return dataclasses.replace(span, file=dataclasses.replace(file, sums=""), sums=sums, first=first)


def from_json(text: str) -> Part:
    """The inverse of `to_json`."""
    return tuple(Span(**{**span, "file": SourceFile(**span["file"])}) for span in json.loads(text))

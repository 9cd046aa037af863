"""The files that the sources name, what identifies their content, and their division into parts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from orchestrator.data.arrow_files import batch_ends, saved_files, schema_of
from orchestrator.data.source_files import (
    BLOCK_BYTES,
    SUM_DIGITS,
    check_unchanged,
    identify,
    open_source,
    tag,
)
from orchestrator.job.data import Source
from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry, transient
from orchestrator.storage.uri import is_local

KINDS = (".txt", ".jsonl", ".parquet", ".csv", ".arrow")
PARTS = 64
PART_BYTES = (2**20, 2**25)
"""Least and most bytes of a part: enough that starting a task is cheap, and little enough for one core's memory."""


@dataclass(frozen=True)
class SourceFile:
    """One file of source number `source`.

    Attributes:
        content: identifies its bytes: their hash, or the ETag of a remote object.
        field: key or column of the text, or of the two texts of a pair, or those of a record by what is read of it;
            empty for .txt.
        sums: for a local file the checksums of its blocks, see `orchestrator.data.source_files`.
    """

    source: int
    uri: str
    kind: str
    size: int
    content: str
    field: str | tuple[str, str] | dict[str, str]
    sums: str = dataclasses.field(default="", repr=False)

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of a row's text, pair of texts or record."""
        if isinstance(self.field, dict):
            return tuple(self.field.values())
        return (self.field,) if isinstance(self.field, str) else tuple(self.field)


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin within bytes [start, stop), row groups [start, stop) of a .parquet file, or the
    record batches in these bytes of an .arrow file.

    `sums`, if not empty, are the checksums of the file from block `first` on, as many as the span may need.
    """

    file: SourceFile
    start: int
    stop: int
    bytes: int
    sums: str = ""
    first: int = 0


Part = tuple[Span, ...]
"""Consecutive spans of one source; one task makes one shard of it."""


def to_json(part: Part, reach: int | None = None) -> str:
    """The part as JSON, for a task on any node that reads at most `reach` bytes after its spans."""
    return json.dumps([asdict(_with_sums(span, reach)) for span in part])


@contextmanager
def opened(span: Span) -> Iterator[BinaryIO]:
    """The file of a span, its blocks checked as they are read. Raises InputError if it has changed, also after all was
    read."""
    file = span.file
    sums, first = (span.sums, span.first) if span.sums else (file.sums, 0)
    with open_source(file.uri, file.size, file.content, sums, first) as found:
        yield found
    check_unchanged(file.uri, file.size, file.content, sums)


def _with_sums(span: Span, reach: int | None) -> Span:
    """The span with only those of its file's checksums that it needs."""
    file, first, last = span.file, 0, None
    if file.kind not in (".parquet", ".arrow") and reach is not None:
        first = max(span.start - 1, 0) // BLOCK_BYTES
        last = (span.stop + reach) // BLOCK_BYTES + 1
    sums = file.sums[first * SUM_DIGITS : None if last is None else last * SUM_DIGITS]
    return dataclasses.replace(span, file=dataclasses.replace(file, sums=""), sums=sums, first=first)


def from_json(text: str) -> Part:
    """The inverse of `to_json`."""
    return tuple(Span(**{**span, "file": SourceFile(**span["file"])}) for span in json.loads(text))


def resolve(sources: Sequence[Source], where: str = "data.sources") -> list[SourceFile]:
    """All files of all sources, whose key in the job file is `where`: in the order of the sources, and by name within a
    source.

    A folder is a dataset that `Dataset.save_to_disk` wrote. Raises InputError for a source that matches nothing, cannot
    be listed, or has files of another kind than KINDS.
    """
    found = [_match(number, source, where) for number, source in enumerate(sources)]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda item: _identify(*item), [item for files in found for item in files]))


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


def _match(number: int, source: Source, where: str) -> list[tuple[int, Source, Any, dict[str, Any]]]:
    """The files of one source, as listed by their file system."""
    where = f"{where}.{number}.uri {source.uri}"
    try:
        fs, path = open_file_system(source.uri, TIMEOUT)
        retry = Retry()
        infos: list[Any] | None
        if retry(fs.isfile, path):
            infos = [retry(fs.info, path)]
        elif retry(fs.isdir, path):
            saved = saved_files(fs, path, where)
            infos = None if saved is None else [retry(fs.info, name) for name in saved]
        else:
            found = retry(fs.glob, path, detail=True)
            infos = [found[name] for name in sorted(found) if found[name]["type"] != "directory"]
    except InputError:
        raise
    except Exception as error:  # every fsspec backend raises errors of its own
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be listed ({error})", where, "check the address and credentials") from None
    if infos is None:
        raise InputError("is a folder", where, f"name its files, for example {source.uri.rstrip('/')}/*.txt")
    if not infos:
        raise InputError("there is no such file", where, "check the path")
    for info in infos:
        if info["type"] != "file":
            raise InputError(f"{info['name']} is not a file", where, "remove it or narrow the glob")
        if PurePosixPath(info["name"]).suffix not in KINDS:
            what = f"{info['name']} is not a {', '.join(KINDS)} file"
            raise InputError(what, where, "convert it or narrow the glob")
    return [(number, source, fs, info) for info in infos]


def _identify(number: int, source: Source, fs: Any, info: dict[str, Any]) -> SourceFile:
    path, local = info["name"], is_local(source.uri)
    try:
        # the content and not the modification time: the same text downloaded again is the same data
        size, content, sums = identify(path) if local else (int(info["size"]), tag(fs, path, info), "")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path, "check its permissions") from None
    if path.endswith(".txt") and not isinstance(source.field, str):
        raise InputError("a .txt file cannot hold pairs or records", path, "give them as .jsonl or .parquet")
    if path.endswith(".csv") and not isinstance(source.field, dict):
        raise InputError(
            "is read for records alone", path, "convert it to .jsonl, or name its columns in field"
        )
    uri = path if local else fs.unstrip_protocol(path)
    kind = PurePosixPath(path).suffix
    return SourceFile(number, uri, kind, size, content, source.field if kind != ".txt" else "", sums)


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

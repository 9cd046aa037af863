"""The rows of a span, whatever its kind: texts, pairs of texts and records are made of them.

A line of .jsonl, .csv and .tsv, a row of .parquet and .arrow, and the members of a .tar that share a key are a row. A
text file has rows with the one column `text`: its documents, or pieces of them where they are long.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from orchestrator.data.prepared.manifest import FORMAT
from orchestrator.data.sources import csv_rows, lines, table_rows, tar_rows, text_rows
from orchestrator.data.sources.files import VANISHED, Span, opened
from orchestrator.data.sources.plain import Damage, Plain, damage_of, measured
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import replaced, sound_value

LIST = Unfit("json", "is no object, and begins a list", "write each of its objects on a line of its own")


class Row(NamedTuple):
    """A row of named columns, and where it stands: the byte at which its line begins, of the plain text, or its number.

    `ends` is False for a piece of a document that the next row goes on with.
    """

    at: int
    values: Mapping[str, Any]
    ends: bool = True


def rows(
    span: Span, rejected: Rejected | None = None, data_format: int = FORMAT, columns: tuple[str, ...] = ()
) -> Iterator[Row]:
    """The rows of a span, in order. What cannot be used goes to `rejected`; without one it is not counted, and a
    compressed file is not checked before it is read.

    With `columns`, a table or an archive has those besides those that its fields name; a line has all. Raises
    InputError for input that cannot be used if the policy of the file is to fail, and for a file that has changed since
    its content was identified.
    """
    file, checked = span.file, rejected is not None and span.file.on_error != "fail"
    rejected = rejected or Rejected()
    if file.content == VANISHED:
        rejected.refuse(file, Unfit("vanished", "there is no such file", "remove it from the list"))
        return
    read = _READERS[file.kind]
    with opened_sound(span, rejected, checked) as handle:
        for at, values, *ends in read(span, handle, rejected, data_format, columns):
            if file.on_error == "fail" or file.kind == ".txt" or _is_sound(span, at, values, rejected):
                yield Row(at, values, *ends)


@contextmanager
def opened_sound(span: Span, rejected: Rejected, checked: bool) -> Iterator[BinaryIO]:
    """The plain bytes of a span's file; that they end early is told to `rejected` after they were read. If it is
    `checked`, a compressed file is read once before, and then as far as it can be trusted."""
    file = span.file
    with opened(span) as raw:
        handle = raw
        if file.compression:
            known = measured(raw, file.compression) if checked else None
            handle = io.BufferedReader(Plain(raw, file.compression, known), lines.BLOCK)
        yield handle
        if damage := damage_of(handle):
            rejected.refuse(file, _unfit(damage))


def _is_sound(span: Span, at: int, values: dict[str, Any], rejected: Rejected) -> bool:
    """Whether the texts that are read of a row are text, after repair if that is the policy; if not, the row goes to
    `rejected`."""
    file = span.file
    names = {column if column in values else column.split(".")[0].split("[")[0] for column in file.columns}
    repaired = None
    for name in names & values.keys():
        try:
            values[name], found = sound_value(values[name], file.on_error)
            repaired = repaired or found
        except Unfit as unfit:
            rejected.refuse(file, unfit, at, values)
            return False
    if repaired:
        rejected.repair(file, repaired, at, values)
    return True


def _unfit(damage: Damage) -> Unfit:
    if damage.cut_off:
        return Unfit("torn", f"is cut off ({damage.reason})", "fetch the file anew")
    return Unfit("damaged", f"is damaged ({damage.reason})", "fetch the file anew")


def stop_of(span: Span) -> float:
    """The byte of the plain text at which a span ends; a compressed file is one span."""
    return math.inf if span.file.compression else span.stop


def _json_rows(
    span: Span, file: BinaryIO, rejected: Rejected, data_format: int, _: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    longest = None if data_format == 1 else lines.LINE_BYTES
    at, stop = span.start, stop_of(span)
    if at:
        at = lines.line_break(file, at, span.file.size, None, span.stop)
        file.seek(at)
    while at < stop and (line := file.readline(-1 if longest is None else longest + 1)):
        begin, at = at, at + len(line)
        if longest is not None and len(line) > longest:
            error = Unfit("long", f"is longer than {longest >> 20} MiB", "split the document")
            rejected.refuse(span.file, error, begin, line[:1000])
            while at < stop and not line.endswith(b"\n") and (line := file.readline(lines.BLOCK)):
                at += len(line)
            continue
        if not line.endswith(b"\n") and damage_of(file):
            return
        if line.strip() and (values := _object(line, span, begin, rejected)) is not None:
            yield begin, values


def _object(line: bytes, span: Span, at: int, rejected: Rejected) -> dict[str, Any] | None:
    """The object of a line of .jsonl; None if it goes to `rejected`."""
    file = span.file
    try:
        try:
            found = json.loads(line)
        except UnicodeDecodeError as error:
            unfit = Unfit("utf-8", f"is not JSON in UTF-8 ({error})")
            if file.on_error != "repair":
                raise unfit from None
            found = json.loads(replaced(line))
            rejected.repair(file, unfit, at, line)
    except Unfit as unfit:
        rejected.refuse(file, unfit, at, line)
        return None
    except (ValueError, RecursionError) as error:
        listed = at == 0 and line.lstrip().startswith(b"[")
        what = LIST if listed else Unfit("json", f"is not JSON ({error})")
        rejected.refuse(file, what, at, line)
        return None
    if not isinstance(found, dict):
        rejected.refuse(file, LIST if isinstance(found, list) else Unfit("json", "is no object"), at, line)
        return None
    return found


_READERS: dict[str, Callable[..., Iterator[tuple[Any, ...]]]] = {
    ".txt": text_rows.read,
    ".jsonl": _json_rows,
    ".csv": csv_rows.read,
    ".tsv": csv_rows.read,
    ".parquet": table_rows.read,
    ".arrow": table_rows.read,
    ".tar": tar_rows.read,
}

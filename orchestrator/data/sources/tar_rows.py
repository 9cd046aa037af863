"""The rows of .tar files in WebDataset layout: members with the same name up to the first dot form one row.

A row has the column `__key__` and, named by what follows the first dot, the members: `.json` is parsed, others are
text. Names are case-insensitive, as in the library webdataset; before format 6 they are not. tarfile ends silently at
a damaged header, so headers are read here, and after a damaged one the next valid one is searched for.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from orchestrator.data.sources import lines
from orchestrator.data.sources.files import Span
from orchestrator.data.sources.plain import damage_of
from orchestrator.data.sources.rejected import Rejected, Unfit

BLOCK = tarfile.BLOCKSIZE
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
PAX = tarfile.XHDTYPE
EMPTY = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)
"""Members that no data follows."""
LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)


class Member(NamedTuple):
    """A file in an archive. `data` is empty if it is not wanted."""

    name: str
    data: bytes


def read(
    span: Span, file: BinaryIO, rejected: Rejected, data_format: int, columns: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an archive, each with its number."""
    wanted = {name.split("[")[0] for name in (*span.file.columns, *columns)}
    wanted |= {name.rsplit(".", depth)[0] for name in wanted for depth in range(1, name.count(".") + 1)}
    called: dict[str, list[str]] = {}
    for name in sorted(wanted):
        called.setdefault(name.lower() if data_format > 5 else name, []).append(name)
    row, key, values, unfit = 0, None, {}, None  # type: int, str | None, dict[str, Any], Unfit | None
    archive = _Archive(span, file, rejected)

    def columns_of(extension: str) -> list[str]:
        return called.get(extension.lower() if data_format > 5 else extension, [])

    for member in archive.members(lambda name: bool(columns_of(_split(name)[1]))):
        its_key, extension = _split(member.name)
        if not extension:
            continue
        if key is not None and its_key != key:
            if unfit:
                rejected.refuse(span.file, unfit, row, key)
            else:
                yield row, values
            row = row + 1
            values = {}
            unfit = None
        key = its_key
        values["__key__"] = key
        try:
            if names := columns_of(extension):
                if names[0] in values:
                    raise Unfit("duplicate", f"{member.name} is there twice")
                values |= dict.fromkeys(names, _value(member, extension))
        except Unfit as error:
            unfit = error
    if key is not None and archive.is_complete:
        if unfit:
            rejected.refuse(span.file, unfit, row, key)
        else:
            yield row, values


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member, and what follows the first dot of its name; empty for a hidden member."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), (extension if stem else "")


def _value(member: Member, extension: str) -> Any:
    """Return the member's value. Raises Unfit."""
    if extension.rsplit(".", 1)[-1].lower() == "json":
        try:
            return json.loads(member.data)
        except (ValueError, RecursionError) as error:
            raise Unfit("json", f"{member.name} is not JSON ({error})") from None
    try:
        return member.data.decode()
    except UnicodeDecodeError:
        return member.data


class _Archive:
    """Reads an archive forwards. `whole` is whether it ended with the closing blocks of zeros."""

    def __init__(self, span: Span, file: BinaryIO, rejected: Rejected) -> None:
        self._source = span.file
        self._file = file
        self._rejected = rejected
        self.is_complete = False
        self._file_count = 0  # files so far

    def members(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        """Yield the files in the archive, with data only for wanted names."""
        for info, name, size in self._headers():
            if info.type in FILES:
                self._file_count += 1
                if not wanted(name):
                    yield Member(name, b"")
                elif size > lines.LINE_BYTES:
                    problem = f"{name} is longer than {lines.LINE_BYTES >> 20} MiB"
                    self._rejected.refuse(
                        self._source, Unfit("long", problem, "split the document"), self._file_count
                    )
                else:
                    data = self._take(size)
                    if len(data) < size:
                        break
                    self._skip(-size % BLOCK)
                    yield Member(name, data)
                    continue
            if info.type in LINKS and wanted(name):
                hint = "write it with tar --dereference --hard-dereference"
                unfit = Unfit("link", f"{name} is a link, which holds nothing", hint)
                self._rejected.refuse(self._source, unfit, self._file_count)
            if info.type not in EMPTY:
                self._skip(size + -size % BLOCK)
        if not self.is_complete and not damage_of(self._file):
            unfit = Unfit("torn", "is cut off: the end of the archive is missing", "fetch the file again")
            self._rejected.refuse(self._source, unfit)

    def _headers(self) -> Iterator[tuple[tarfile.TarInfo, str, int]]:
        """Yield each member's header, name and size. The caller moves the file past the member's data.

        Damaged blocks are left out, and each stretch of them is refused once.
        """
        extended: dict[str, str] = {}
        damaged = False
        while len(head := self._take(BLOCK)) == BLOCK:
            self.is_complete = not any(head)
            if self.is_complete:
                continue
            try:
                info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                if not damaged:
                    self._rejected.refuse(
                        self._source, Unfit("damaged", f"is damaged ({error})"), self._file_count
                    )
                damaged = True
                continue
            damaged = False
            if info.type in (PAX, tarfile.GNUTYPE_LONGNAME):
                extended |= self._extended(info)
                continue
            yield info, extended.get("path", info.name), int(extended.get("size", info.size))
            extended = {}

    def _extended(self, info: tarfile.TarInfo) -> dict[str, str]:
        """Return the path and the size of the next member, which do not fit its header."""
        data = self._take(min(info.size, lines.LINE_BYTES))
        self._skip(info.size - len(data) + -info.size % BLOCK)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode(errors="surrogateescape")}
        result = {}
        while data:  # records of the form "<length> <key>=<value>\n"
            length, _, entry = data.partition(b" ")
            if not length.isdigit() or not int(length):
                break
            key, _, value = entry[: max(0, int(length) - len(length) - 2)].partition(b"=")
            result[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
            data = data[int(length) :]
        if not result.get("size", "0").isdecimal():
            del result["size"]
        return {name: result[name] for name in ("path", "size") if name in result}

    def _take(self, size: int) -> bytes:
        return self._file.read(size)

    def _skip(self, size: int) -> None:
        while size > 0 and (skipped := len(self._file.read(min(size, lines.BLOCK)))):
            size -= skipped

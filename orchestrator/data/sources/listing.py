"""The files that the sources name, and what identifies their content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import has_magic
from typing import Any, NamedTuple
from urllib.parse import unquote

from orchestrator.config.data import Source
from orchestrator.config.errors import InputError, Unreachable
from orchestrator.config.redact import without_credentials
from orchestrator.data.sources.arrow_files import saved_files
from orchestrator.data.sources.files import VANISHED, SourceFile
from orchestrator.data.sources.identity import numbered
from orchestrator.data.sources.kinds import ROWS, kind_of
from orchestrator.data.sources.verified import identify, tag
from orchestrator.storage.file_system import open_file_system, shared_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry, status_of, transient
from orchestrator.storage.uri import is_local, local_path

LIST = ".list"
"""How the name of a file ends that names files, one a line."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""What a folder in the manner of Hive has in place of a value that is null."""
THREADS = 8
ABSENT = (404, 410)
"""Answers of HTTP that say that there is no such file."""


class Listed(NamedTuple):
    """A file as its file system lists it; without `info` it was named and is not there."""

    fs: Any
    name: str
    info: dict[str, Any] | None
    local: bool


def resolve(
    sources: Sequence[Source], where: str = "data.sources", on_error: str = "fail"
) -> list[SourceFile]:
    """All files of all sources, whose key in the job file is `where`: in the order of the sources and of what each
    names, and by name within a glob or a folder.

    A folder is a dataset that `Dataset.save_to_disk` wrote, or stands for all files below it. A file that a list names
    and that is not there is passed on, unless `on_error` is fail. Raises InputError for a source that matches nothing,
    cannot be listed, names a file twice, or has files that hold no text.
    """
    found: list[SourceFile] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for number, source in enumerate(sources):
            key = f"{where}.{number}.uri"
            listed = [file for place in source.places for file in _files(place, key, source, on_error, pool)]
            _refuse_twice(listed, key)
            found += pool.map(
                lambda file, n=number, s=source, k=key: _identify(n, s, k, file, on_error), listed
            )
    return numbered(found)


def _files(place: str, key: str, source: Source, on_error: str, pool: ThreadPoolExecutor) -> list[Listed]:
    """What a path, glob or URI stands for."""
    where = f"{key} {place}"
    if place.endswith(LIST) and source.format is None:
        found = list(pool.map(lambda named: _named_in_list(named, where, on_error), _lines(place, where)))
        return [file for files in found for file in files]
    found_here = _match(place, where)
    if not found_here:
        raise InputError("there is no such file", where, "check the path")
    return found_here


def _match(place: str, where: str) -> list[Listed]:
    """The files of a path, glob or URI; none if there is no such file."""
    try:
        fs, path = _file_system(place)
        return _checked(fs, list(_infos(fs, path, where)), is_local(place), where)
    except InputError:
        raise
    except Exception as error:  # every fsspec backend raises errors of its own
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be listed ({error})", where, "check the address and credentials") from None


def _file_system(place: str) -> tuple[Any, str]:
    return open_file_system(place, TIMEOUT) if is_local(place) else shared_file_system(place, TIMEOUT)


def _infos(fs: Any, path: str, where: str) -> Iterator[dict[str, Any]]:
    retry = Retry()
    try:
        info = retry(fs.info, path)
    except FileNotFoundError as error:  # so fsspec tells whatever a server of HTTP has answered
        if "*" not in path and status_of(error.__cause__) not in (0, *ABSENT):
            raise error.__cause__ or error from None
        info = None
    if info is not None and info["type"] == "file":
        yield info
    elif info is not None and info["type"] == "directory":
        saved = saved_files(fs, path, where)
        yield from ([retry(fs.info, name) for name in saved] if saved else _below(fs, path, where))
    else:
        found = retry(fs.glob, path, detail=True)
        for name in (name for name in sorted(found) if not _is_hidden(name, path)):
            info = _behind_link(fs, found[name])
            if info["type"] != "directory":
                yield info


def _is_hidden(name: str, pattern: str) -> bool:
    """Whether a file, or a folder above it, begins with a dot where the pattern has a wildcard, as a shell's does not
    match it: such are copies that an editor keeps, and what a system notes about a file."""
    steps = pattern.split("/")
    first = next((number for number, step in enumerate(steps) if has_magic(step)), len(steps))
    if any(step.startswith(".") for step in steps[first:]):
        return False
    return any(step.startswith(".") for step in name.split("/")[first:])


def _behind_link(fs: Any, info: dict[str, Any]) -> dict[str, Any]:
    """What a link leads to, under the link's name: a listing tells of links. The link itself where that is nothing."""
    if not info.get("islink"):
        return info
    try:
        return {**Retry()(fs.info, info["name"]), "name": info["name"]}
    except FileNotFoundError:
        return info


def _below(fs: Any, folder: str, where: str) -> list[dict[str, Any]]:
    """The files in a folder and those below it, but for what is hidden. Raises InputError for a mixture of texts and
    rows, of which one may be there by chance."""
    found = Retry()(fs.find, folder, detail=True)
    names = [
        name
        for name in sorted(found)
        if not any(step.startswith((".", "_")) for step in name[len(folder) :].strip("/").split("/"))
    ]
    if not names:
        raise InputError("is a folder without files", where, "check the path")
    kinds: dict[bool, str] = {}
    for name in names:
        if kind := kind_of(name, None):
            kinds.setdefault(kind.kind in ROWS, name)
    if len(kinds) > 1:
        what = f"is a folder of rows ({os.path.basename(kinds[True])}) and of texts ({os.path.basename(kinds[False])})"
        raise InputError(
            what, where, f"name its files, for example {where.split()[-1].rstrip('/')}/**/*.jsonl"
        )
    return [_behind_link(fs, found[name]) for name in names]


def _checked(fs: Any, infos: list[dict[str, Any]], local: bool, where: str) -> list[Listed]:
    for info in infos:
        if info["type"] != "file":
            raise InputError(f"{info['name']} is not a file", where, "remove it or narrow the glob")
    return [Listed(fs, info["name"], info, local) for info in infos]


def _lines(place: str, where: str) -> list[str]:
    """The files that a list names, those without a protocol relative to its folder."""
    try:
        fs, path = _file_system(place)
        text = Retry()(fs.cat_file, path).decode()
    except FileNotFoundError:
        raise InputError("there is no such file", where, "check the path") from None
    except UnicodeDecodeError:
        raise InputError("is no list of names in UTF-8", where, "give one name a line") from None
    except Exception as error:
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be read ({error})", where, "check the address and credentials") from None
    folder = place.rsplit("/", 1)[0] if "/" in place else "."
    names = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    found = [
        name if "://" in name or name.startswith("/") else f"{folder}/{name}"
        for name in names
        if name and not name.startswith("#")
    ]
    if not found:
        raise InputError("is a list without names", where, "give one name a line")
    return found


def _named_in_list(place: str, where: str, on_error: str) -> list[Listed]:
    if found := _match(place, f"{where}: {place}"):
        return found
    if on_error == "fail":
        raise InputError(
            f"names {place}, and there is no such file", where, "remove it, or set data.on_error"
        )
    fs, path = _file_system(place)
    return [Listed(fs, path, None, is_local(place))]


def _refuse_twice(listed: Sequence[Listed], key: str) -> None:
    seen: set[str] = set()
    for file in listed:
        place = os.path.realpath(local_path(file.name)) if file.local else file.name
        if place in seen:
            what = f"names {file.name} twice" + (", by a link" if file.local and place != file.name else "")
            raise InputError(what, key, "name it once; weight says how often it is read")
        seen.add(place)


def _identify(number: int, source: Source, key: str, file: Listed, on_error: str) -> SourceFile:
    path = file.name
    uri = path if file.local else file.fs.unstrip_protocol(path)
    kind = kind_of(without_credentials(uri), source.format)
    if kind is None:
        hint = "convert it, narrow the glob, or say its format"
        raise InputError(f"{path} holds no text that can be read, by the end of its name", key, hint)
    if kind.kind == ".txt" and not isinstance(source.field, str):
        raise InputError("a text file cannot hold pairs or records", path, "give them as .jsonl or .parquet")
    field = source.field if kind.kind != ".txt" else ""
    gone = SourceFile(number, uri, kind.kind, 0, VANISHED, field, "", kind.compression, on_error)
    gone = replace(gone, folders=_said_by_folders(path, gone.columns))
    if file.info is None:
        return gone
    try:
        # the content and not the modification time: the same text downloaded again is the same data
        if file.local:
            size, content, sums = identify(local_path(path))
        else:
            size = int(file.info["size"])
            content = tag(file.fs, path, file.info)
            sums = ""
    except FileNotFoundError as error:
        if on_error != "fail":
            return gone
        raise InputError(f"cannot be read ({error.strerror})", path, "check that it is there") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path, "check its permissions") from None
    return replace(gone, size=size, content=content, sums=sums)


def _said_by_folders(path: str, columns: Sequence[str]) -> dict[str, str | None]:
    """The values of those of the `columns` that folders of a path name in the manner of Hive, as texts."""
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, is_said, value = folder.partition("=")
        if is_said and unquote(name) in columns:
            found[unquote(name)] = None if value == HIVE_NULL else unquote(value)
    return found

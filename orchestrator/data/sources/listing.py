"""The files that the sources name, and the identity of their content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import has_magic
from typing import Any, NamedTuple
from urllib.parse import unquote

from orchestrator.config.errors import Absent, InputError, Unreachable
from orchestrator.config.redact import without_credentials
from orchestrator.data.config import Source
from orchestrator.data.sources.arrow_files import saved_files
from orchestrator.data.sources.dataset_card import Cards
from orchestrator.data.sources.files import VANISHED, SourceFile
from orchestrator.data.sources.identity import numbered
from orchestrator.data.sources.kinds import ROWS, kind_of
from orchestrator.data.sources.own_rows import is_made
from orchestrator.data.sources.verified import identify, tag
from orchestrator.storage.file_system import open_file_system, shared_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry, status_of, transient
from orchestrator.storage.uri import is_local, local_path

LIST = ".list"
"""The suffix of a file that lists files, one per line."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""A null in a Hive-style folder name."""
THREADS = 8
ABSENT = (404, 410)
"""HTTP status codes for a missing file."""


class Listed(NamedTuple):
    """A file as its file system lists it. Without `info`, it was named but does not exist."""

    fs: Any
    name: str
    info: dict[str, Any] | None
    local: bool


def resolve(
    sources: Sequence[Source], where: str = "data.sources", on_error: str = "fail"
) -> list[SourceFile]:
    """Return all files of all sources, in the order of the sources and of the names in each, sorted by name within a
    glob or folder.

    A folder is a dataset written by `Dataset.save_to_disk`, or stands for all files below it. A missing file from a
    list is kept unless `on_error` is fail. `where` is the sources' key in the job file.

    Raises InputError for a source that matches nothing, cannot be listed, names a file twice, or has files without
    text.
    """
    files: list[SourceFile] = []
    cards = Cards()
    with ThreadPoolExecutor(THREADS) as pool:
        for number, source in enumerate(sources):
            key = f"{where}.{number}.uri"
            listed = [file for uri in source.uris for file in _files(uri, key, source, on_error, pool)]
            _refuse_twice(listed, key)
            files += pool.map(
                lambda file, n=number, s=source, k=key: _with_labels(
                    _identify(n, s, k, file, on_error), file, cards
                ),
                listed,
            )
    return numbered(files)


def _files(path: str, key: str, source: Source, on_error: str, pool: ThreadPoolExecutor) -> list[Listed]:
    """Return the files of a path, glob or URI."""
    where = f"{key} {path}"
    if source.own is not None and not is_made(source):
        hint = "`orchestrator data prepare JOB` makes them, and so does `orchestrator run`"
        raise Absent(f"the rows of {source.own} are not made yet", where, hint)
    if path.endswith(LIST) and source.format is None:
        result = list(pool.map(lambda named: _named_in_list(named, where, on_error), _lines(path, where)))
        return [file for files in result for file in files]
    matches = _match(path, where)
    if not matches:
        raise InputError("there is no such file", where, "check the path")
    return matches


def _match(uri: str, where: str) -> list[Listed]:
    """Return the files of a path, glob or URI; empty if there is none."""
    try:
        fs, path = _file_system(uri)
        return _checked(fs, list(_infos(fs, path, where)), is_local(uri), where)
    except InputError:
        raise
    except Exception as error:  # fsspec backends raise various errors
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be listed ({error})", where, "check the address and credentials") from None


def _file_system(path: str) -> tuple[Any, str]:
    return open_file_system(path, TIMEOUT) if is_local(path) else shared_file_system(path, TIMEOUT)


def _infos(fs: Any, path: str, where: str) -> Iterator[dict[str, Any]]:
    retry = Retry()
    try:
        info = retry(fs.info, path)
    except FileNotFoundError as error:  # fsspec raises this for any HTTP error status
        if "*" not in path and status_of(error.__cause__) not in (0, *ABSENT):
            raise error.__cause__ or error from None
        info = None
    if info is not None and info["type"] == "file":
        yield info
    elif info is not None and info["type"] == "directory":
        saved = saved_files(fs, path, where)
        yield from ([retry(fs.info, name) for name in saved] if saved else _below(fs, path, where))
    else:
        matches = retry(fs.glob, path, detail=True)
        for name in (name for name in sorted(matches) if not _is_hidden(name, path)):
            info = _behind_link(fs, matches[name])
            if info["type"] != "directory":
                yield info


def _is_hidden(name: str, pattern: str) -> bool:
    """Return whether a file, or a folder above it, begins with a dot where the pattern has a wildcard.

    As in a shell, a wildcard does not match these: they are editors' copies and systems' notes about files.
    """
    steps = pattern.split("/")
    first = next((number for number, step in enumerate(steps) if has_magic(step)), len(steps))
    if any(step.startswith(".") for step in steps[first:]):
        return False
    return any(step.startswith(".") for step in name.split("/")[first:])


def _behind_link(fs: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Return the target of a link under the link's name, because a listing reports the link; a broken link
    unchanged."""
    if not info.get("islink"):
        return info
    try:
        return {**Retry()(fs.info, info["name"]), "name": info["name"]}
    except FileNotFoundError:
        return info


def _below(fs: Any, folder: str, where: str) -> list[dict[str, Any]]:
    """Return the files in a folder and below it, except hidden ones.

    Raises InputError for a mixture of texts and rows, because one kind may be there by accident.
    """
    entries = Retry()(fs.find, folder, detail=True)
    names = [
        name
        for name in sorted(entries)
        if not any(step.startswith((".", "_")) for step in name[len(folder) :].strip("/").split("/"))
    ]
    if not names:
        raise InputError("is a folder without files", where, "check the path")
    kinds: dict[bool, str] = {}
    for name in names:
        if kind := kind_of(name, None):
            kinds.setdefault(kind.kind in ROWS, name)
    if len(kinds) > 1:
        rows_file = os.path.basename(kinds[True])
        text_file = os.path.basename(kinds[False])
        problem = f"is a folder of rows ({rows_file}) and of texts ({text_file})"
        raise InputError(
            problem, where, f"name its files, for example {where.split()[-1].rstrip('/')}/**/*.jsonl"
        )
    return [_behind_link(fs, entries[name]) for name in names]


def _checked(fs: Any, infos: list[dict[str, Any]], local: bool, where: str) -> list[Listed]:
    for info in infos:
        if info["type"] != "file":
            raise InputError(f"{info['name']} is not a file", where, "remove it or narrow the glob")
    return [Listed(fs, info["name"], info, local) for info in infos]


def _lines(uri: str, where: str) -> list[str]:
    """Return the files that a list names. Names without a protocol are relative to its folder."""
    try:
        fs, path = _file_system(uri)
        text = Retry()(fs.cat_file, path).decode()
    except FileNotFoundError:
        raise InputError("there is no such file", where, "check the path") from None
    except UnicodeDecodeError:
        raise InputError("is not a list of names in UTF-8", where, "give one name a line") from None
    except Exception as error:
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be read ({error})", where, "check the address and credentials") from None
    folder = uri.rsplit("/", 1)[0] if "/" in uri else "."
    names = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    result = [
        name if "://" in name or name.startswith("/") else f"{folder}/{name}"
        for name in names
        if name and not name.startswith("#")
    ]
    if not result:
        raise InputError("is a list without names", where, "give one name a line")
    return result


def _named_in_list(uri: str, where: str, on_error: str) -> list[Listed]:
    if matches := _match(uri, f"{where}: {uri}"):
        return matches
    if on_error == "fail":
        raise InputError(f"names {uri}, but there is no such file", where, "remove it, or set data.on_error")
    fs, path = _file_system(uri)
    return [Listed(fs, path, None, is_local(uri))]


def _refuse_twice(listed: Sequence[Listed], key: str) -> None:
    resolved_paths: set[str] = set()
    for file in listed:
        resolved_path = os.path.realpath(local_path(file.name)) if file.local else file.name
        if resolved_path in resolved_paths:
            problem = f"names {file.name} twice" + (
                ", by a link" if file.local and resolved_path != file.name else ""
            )
            raise InputError(problem, key, "name it once; weight says how often it is read")
        resolved_paths.add(resolved_path)


def _identify(number: int, source: Source, key: str, file: Listed, on_error: str) -> SourceFile:
    path = file.name
    uri = path if file.local else file.fs.unstrip_protocol(path)
    kind = kind_of(without_credentials(uri), source.format)
    if kind is None:
        hint = "convert it, narrow the glob, or say its format"
        raise InputError(f"{path} holds no text that can be read, judging by its name", key, hint)
    if kind.kind == ".txt" and not isinstance(source.field, str):
        raise InputError("a text file cannot hold pairs or records", path, "give them as .jsonl or .parquet")
    field = source.field if kind.kind != ".txt" else ""
    vanished = SourceFile(
        number,
        uri,
        kind=kind.kind,
        size=0,
        content=VANISHED,
        field=field,
        sums="",
        compression=kind.compression,
        on_error=on_error,
    )
    vanished = replace(vanished, folders=_values_in_folders(path, vanished.columns))
    if file.info is None:
        return vanished
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
            return vanished
        raise InputError(f"cannot be read ({error.strerror})", path, "check that it is there") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path, "check its permissions") from None
    return replace(vanished, size=size, content=content, sums=sums)


def _with_labels(file: SourceFile, listed: Listed, cards: Cards) -> SourceFile:
    if listed.info is None:
        return file
    labels = cards.labels_of(file, listed.fs, listed.name)
    return replace(file, labels=labels) if labels else file


def _values_in_folders(path: str, columns: Sequence[str]) -> dict[str, str | None]:
    """Return the values of those `columns` that Hive-style folder names in a path give, as texts."""
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if equals and unquote(name) in columns:
            values[unquote(name)] = None if value == HIVE_NULL else unquote(value)
    return values

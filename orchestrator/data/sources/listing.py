"""The files that the sources name, and what identifies their content."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

from orchestrator.data.sources.arrow_files import saved_files
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.verified import identify, tag
from orchestrator.job.data import Source
from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry, transient
from orchestrator.storage.uri import is_local

KINDS = (".txt", ".jsonl", ".parquet", ".csv", ".arrow")


def resolve(sources: Sequence[Source], where: str = "data.sources") -> list[SourceFile]:
    """All files of all sources, whose key in the job file is `where`: in the order of the sources, and by name within a
    source.

    A folder is a dataset that `Dataset.save_to_disk` wrote. Raises InputError for a source that matches nothing, cannot
    be listed, or has files of another kind than KINDS.
    """
    found = [_match(number, source, where) for number, source in enumerate(sources)]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda item: _identify(*item), [item for files in found for item in files]))


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

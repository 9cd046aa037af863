"""Small files on any fsspec file system, written whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from orchestrator.errors import InputError


class Folder:
    """A folder on any fsspec file system. Raises InputError for a protocol that cannot be used."""

    def __init__(self, uri: str) -> None:
        try:
            self.fs, self.path = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise InputError(
                f"cannot be opened ({error})", uri, "use a path or an fsspec URI such as s3://"
            ) from None
        self.path = self.path.rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)
        self.uri = self.path if self.local else uri.rstrip("/")

    def at(self, name: str) -> str:
        """The path of `name` within, as the file system takes it."""
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of a file, or None if there is none. Raises InputError if it may not be read."""
        try:
            return bytes(self.fs.cat_file(self.at(name)))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise InputError(
                f"may not be read ({error})", self.uri, "check permissions and credentials"
            ) from None

    def read_json(self, name: str) -> Any:
        """A JSON document, or None if there is none."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    def names(self, folder: str) -> set[str]:
        """Names of the files in a folder within; empty if there is none."""
        self.fs.invalidate_cache(self.at(folder))
        try:
            found = self.fs.ls(self.at(folder), detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rsplit("/", 1)[-1] for path in found}

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole: a reader sees the old one or the new one, also after a crash of the machine."""
        path = self.at(name)
        if not self.local:
            self.fs.pipe_file(path, data)  # an object appears when its upload is complete
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{uuid.uuid4().hex}.tmp"
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document whole."""
        self.write(name, json.dumps(value).encode() + b"\n")

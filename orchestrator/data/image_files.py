"""The images of a folder or of WebDataset archives, with what is said of each: read in a fixed order, decoded to arrays
of one size.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from orchestrator.data.sources import Span, resolve, tar_rows
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.plain import opened_plain
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.job.data import Source
from orchestrator.job.errors import InputError
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
CAPTION, CLASS = "txt", "cls"
TARS = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tgz")


class RawImage(NamedTuple):
    """An image file's bytes, the class that it is said to be of, its caption, and where it is: the file and for an
    archive the number of the row."""

    data: bytes
    label: str | None
    caption: str | None
    file: SourceFile
    row: int | None


class ImageSource:
    """The images at `uri`: a folder, or one or more archives by path or glob. Raises InputError."""

    def __init__(self, uri: str, on_error: str, where: str) -> None:
        self.uri, self._on_error, self._where = uri, on_error, where
        self._is_tar = uri.lower().endswith(TARS)

    def read(self, rejected: Rejected) -> Iterator[RawImage]:
        """All images in the order of their names, or of the archive. What is none goes to `rejected`."""
        return self._in_tars(rejected) if self._is_tar else self._in_folder(rejected)

    def fingerprint(self) -> str:
        """A checksum of the names and contents of all files."""
        digest = xxhash.xxh3_128()
        if self._is_tar:
            for file in self._archives():
                digest.update(f"{file.content} {file.size}\n".encode())
            return digest.hexdigest()
        files, folder = self._files()
        for name in files:
            data = self._bytes(folder, name)
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
        return digest.hexdigest()

    def _archives(self) -> list[SourceFile]:
        columns = {name: name for name in (*IMAGES, CAPTION, CLASS)}
        source = Source(uri=self.uri, format="tar", field=columns)
        return resolve([source], self._where, self._on_error)

    def _in_tars(self, rejected: Rejected) -> Iterator[RawImage]:
        for file in self._archives():
            with opened_plain(file) as plain:
                span = Span(file, 0, file.size, file.size)
                for row, values in tar_rows.read(span, plain, rejected, 0, ()):
                    data = next((values[kind] for kind in IMAGES if kind in values), None)
                    if data is None:
                        rejected.refuse(file, Unfit("type", f"{values['__key__']} has no image"), row)
                        continue
                    label, caption = (_text(values.get(kind)) for kind in (CLASS, CAPTION))
                    data = data.encode() if isinstance(data, str) else data
                    yield RawImage(data, label, caption, file, row)

    def _files(self) -> tuple[list[str], tuple[Any, str]]:
        """The names of the files below the folder, sorted, and how they are read."""
        try:
            fs, root = open_file_system(self.uri, TIMEOUT)
            found = Retry()(fs.find, root)
        except Exception as error:  # every fsspec backend raises errors of its own
            raise InputError(f"cannot be listed ({error})", f"{self._where} {self.uri}", "check it") from None
        names = sorted(path[len(root) :].strip("/") for path in found)
        names = [n for n in names if n and not any(step.startswith((".", "_")) for step in n.split("/"))]
        if not names:
            raise InputError("is no folder with images", f"{self._where} {self.uri}", "check the path")
        return names, (fs, root.rstrip("/"))

    def _bytes(self, folder: tuple[Any, str], name: str) -> bytes:
        fs, root = folder
        try:
            data: bytes = Retry()(fs.cat_file, f"{root}/{name}")
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", f"{root}/{name}", "check it") from None
        return data

    def _in_folder(self, rejected: Rejected) -> Iterator[RawImage]:
        names, folder = self._files()
        there = set(names)
        for name in names:
            path = PurePosixPath(name)
            kind = path.suffix[1:].lower()
            if kind == CAPTION:
                continue
            uri = f"{folder[1]}/{name}"
            file = SourceFile(0, uri, ".image", 0, "", "", on_error=self._on_error)
            if kind not in IMAGES:
                rejected.refuse(file, Unfit("type", f"is no image by the end of its name ({path.suffix})"))
                continue
            said = str(path.with_suffix(f".{CAPTION}"))
            caption = self._bytes(folder, said).decode(errors="replace").strip() if said in there else None
            label = path.parts[0] if len(path.parts) > 1 else None
            yield RawImage(self._bytes(folder, name), label, caption or None, file, None)


def decoded(data: bytes, size: int, channels: int) -> np.ndarray:
    """An image as uint8 [size, size, channels]: its shorter side is scaled to `size`, and the middle is cut out.

    Raises Unfit if it cannot be decoded whole.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
            # ImageOps.fit cuts first and scales after, both in one step.
            image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    except Exception as error:  # decoders of single formats raise errors of their own
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise Unfit("image", f"cannot be decoded ({reason})") from None
    return np.asarray(image, np.uint8).reshape(size, size, channels)


def byte_tokens(texts: Sequence[str], length: int) -> np.ndarray:
    """UTF-8 bytes between 256 and 257, which also fills up what is left: int32 [texts, length]."""
    found = np.full((len(texts), length), 257, np.int32)
    for row, text in zip(found, texts, strict=True):
        ids = [256, *text.encode()][: length - 1]
        row[: len(ids)] = ids
    return found


def _text(value: Any) -> str | None:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return str(text).strip() or None if text is not None else None

"""The kind and compression of a file, by its suffixes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple


@dataclass(frozen=True)
class Rows:
    """A kind of files with rows.

    Attributes:
        suffixes: the suffixes of such files, the kind's own first.
        divided: whether a part may begin in the middle of a file. Others can be read only from the beginning: a line
            may end within a quoted value, and a member's text is anywhere.
        numbered: whether a row is identified by its number. In others it is identified by the byte at which its line
            begins.
    """

    suffixes: tuple[str, ...]
    divided: bool
    numbered: bool


KINDS = (
    Rows((".jsonl", ".ndjson", ".json"), divided=True, numbered=False),
    Rows((".parquet", ".pq"), divided=True, numbered=True),
    Rows((".csv",), divided=False, numbered=False),
    Rows((".tsv",), divided=False, numbered=False),
    Rows((".arrow", ".feather"), divided=True, numbered=True),
    Rows((".tar",), divided=False, numbered=True),
)
"""The kinds of files with rows. `rows` has the reader of each, and `data.sources[].format` its name."""
ROWS = {suffix: kind.suffixes[0] for kind in KINDS for suffix in kind.suffixes}
"""Suffixes of files with rows, and the kind of each."""
UNDIVIDED = tuple(kind.suffixes[0] for kind in KINDS if not kind.divided)
NUMBERED = tuple(kind.suffixes[0] for kind in KINDS if kind.numbered)
COMPRESSED = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst", ".zstd": "zst"}
SHORT = {".tgz": (".tar", "gz"), ".tbz2": (".tar", "bz2"), ".txz": (".tar", "xz")}
NO_TEXT = {
    *(".zip", ".7z", ".rar", ".lz4", ".lzma", ".sz", ".snappy", ".br"),
    *(".pdf", ".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".odt", ".epub"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico"),
    *(".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv", ".avi"),
    *(".npy", ".npz", ".pt", ".pth", ".bin", ".safetensors", ".pkl", ".pickle", ".h5", ".hdf5"),
    *(".db", ".sqlite", ".mdb", ".idx", ".orc", ".avro"),
    *(".exe", ".dll", ".so", ".o", ".a", ".pyc", ".class", ".jar", ".woff", ".woff2", ".ttf"),
}
"""Suffixes of files without plain text. A file with any other suffix, or without one, is text."""


class Kind(NamedTuple):
    """The kind of a file as a suffix, `.txt` for any text; and its compression, empty without one."""

    kind: str
    compression: str


def kind_of(name: str, form: str | None) -> Kind | None:
    """Return the kind of a file by its name, or by its source's `format`; None if it is not plain text."""
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if suffix in SHORT and form is None:
        return Kind(*SHORT[suffix])
    compression = COMPRESSED.get(suffix, "")
    if compression:
        suffix = PurePosixPath(path.stem).suffix.lower()
    if form is not None:
        return Kind(f".{form}" if form != "text" else ".txt", compression)
    kind = ROWS.get(suffix, ".txt")
    if suffix in NO_TEXT or (compression and kind in (".parquet", ".arrow")):
        return None
    return Kind(kind, compression)

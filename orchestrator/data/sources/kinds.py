"""The kind and compression of a file, by its suffixes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

ROWS = {
    ".jsonl": ".jsonl",
    ".ndjson": ".jsonl",
    ".json": ".jsonl",
    ".parquet": ".parquet",
    ".pq": ".parquet",
    ".csv": ".csv",
    ".tsv": ".tsv",
    ".arrow": ".arrow",
    ".feather": ".arrow",
    ".tar": ".tar",
}
"""Suffixes of files with rows, and the kind of each."""
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

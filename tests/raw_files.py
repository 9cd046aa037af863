"""Raw files of all kinds with the same rows, for tests of the sources."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources.documents import pieces
from orchestrator.data.sources.rejected import Rejected

TEXTS = [f"text {i}, of été\nand two lines" * (i % 3 + 1) for i in range(40)]
ROWS = [
    {"text": text, "more": {"title": [f"title {i}"]}, "label": "good" if i % 2 else "bad"}
    for i, text in enumerate(TEXTS)
]


def text(rows: list[dict[str, Any]]) -> bytes:
    return "\n<|endoftext|>\n".join(row["text"] for row in rows).encode()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def tar(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, row in enumerate(rows):
            for name, data in (("txt", row["text"]), ("json", json.dumps(row)), ("cls", row["label"])):
                info = tarfile.TarInfo(f"{'folder-' * (number % 2 * 20)}/{number:04d}.{name}")
                info.size = len(data.encode())
                archive.addfile(info, io.BytesIO(data.encode()))
    return file.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
    return file.getvalue()


def arrow(rows: list[dict[str, Any]], form: str = "stream") -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(rows)
    if form == "feather":
        feather.write_feather(table, file, compression="zstd", chunksize=9)
        return file.getvalue()
    with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return file.getvalue()


KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "txt": text,
    "md": text,
    "jsonl": jsonl,
    "ndjson": jsonl,
    "csv": separated,
    "tsv": lambda rows: separated(rows, "\t"),
    "tar": tar,
    "parquet": parquet,
    "arrow": arrow,
    "feather": lambda rows: arrow(rows, "feather"),
}
FIELDS = {"tar": "txt"}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
CASES = [
    (kind, form)
    for kind in KINDS
    for form in COMPRESS
    if not form or kind not in ("parquet", "arrow", "feather")
]


def read(
    path: Path, part_bytes: int = 10**9, on_error: str = "fail", rejected: Rejected | None = None, **keys: Any
) -> list[str]:
    """The documents of a file that is cut into parts, as tasks read them."""
    files = sources.resolve([Source(uri=str(path), **keys)], on_error=on_error)
    found, held = [], ""
    for part in sources.cut(files, part_bytes):
        for span in sources.from_json(sources.to_json(part, 2**26)):
            for piece in pieces(span, rejected=rejected or Rejected()):
                held += piece.text
                if piece.ends:
                    found.append(held)
                    held = ""
    assert not held
    return found

"""How many rows the data of a job has, and about how many sequences they fill."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.sources.arrow_files import batches_in
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.json_rows import begins_list
from orchestrator.data.sources.kinds import Kind, kind_of
from orchestrator.data.sources.lines import LINE_BYTES
from orchestrator.data.sources.rejected import Unfit
from orchestrator.launch.first_rows import is_cut, plain_bytes, row_files, rows_of

MOST = 2**30
"""Bytes of a source, decompressed, that are read at most to count its rows."""
SAMPLED = 200
"""Rows of a source whose tokens are counted."""
SAMPLED_TEXT = 2**18
"""Characters of a text file whose tokens are counted."""
OF_MESSAGE = 5
"""Tokens that a chat template puts around a message, about."""
NO_CONTENT = ("role", "from")


@dataclass(frozen=True)
class Counted:
    """Rows of a source; None if they are not known, and then why not."""

    rows: int | None
    why_not: str = ""


class _TooManyError(ValueError):
    """There are too many rows to count them."""


def is_local_source(uri: str) -> bool:
    """Return whether a source is on this machine."""
    return bool(glob(uri)) or Path(uri).exists()


def counted(uri: str) -> Counted:
    """Return the rows of a source."""
    if not is_local_source(uri):
        return Counted(None, f"{uri} is not here")
    try:
        files = row_files(uri)
        if not files:
            return Counted(None, f"{uri} has no rows to count")
        return Counted(sum(_rows_in(*file) for file in files))
    except _TooManyError:
        return Counted(None, f"{uri} is too long to count its rows")
    except (OSError, ValueError, csv.Error, InputError) as error:
        return Counted(None, f"{uri} cannot be read ({' '.join(str(error).split())[:100]})")


def sequences_in(
    uri: str, field: Any, rows: int | None, folder: Path, length: int, whole_rows: bool
) -> float | None:
    """Return about how many sequences a source fills, by its first rows; None if that cannot be known here.

    Args:
        uri: the source.
        field: its `field`.
        rows: its rows, if they are known.
        folder: the folder with the tokenizer.
        length: tokens of a sequence.
        whole_rows: whether a sequence holds whole rows, as many as fit, and a longer row is cut off.
    """
    if not (folder / "tokenizer.json").is_file() or not is_local_source(uri):
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    files = row_files(uri)
    if not files:
        tokens = _tokens_of_text(uri, tokenizer)
        return tokens if tokens is None else tokens / length
    around = OF_MESSAGE if isinstance(field, Mapping) else 1  # the end of a document
    lengths: list[int] = []
    try:
        for row in islice((row for file in files for row in rows_of(*file)), SAMPLED):
            columns = [*field.values()] if isinstance(field, Mapping) else [field or "text"]
            texts = [text for column in columns for text in _texts(value_of(row, column))]
            lengths.append(sum(len(encoding.ids) + around for encoding in tokenizer.encode_batch(texts)))
    except (OSError, ValueError, csv.Error, InputError, Unfit):
        return None
    if not lengths or rows is None:
        return None
    return _filled(lengths, length, whole_rows) * rows / len(lengths)


def _filled(lengths: Sequence[int], length: int, whole_rows: bool) -> float:
    """Return how many sequences rows of these lengths fill."""
    if not whole_rows:
        return sum(lengths) / length
    full, tokens = 0, 0
    for row_length in lengths:
        cut_length = min(row_length, length)
        if tokens + cut_length > length:
            full, tokens = full + 1, 0
        tokens += cut_length
    return full + tokens / length


def _tokens_of_text(uri: str, tokenizer: Any) -> float | None:
    paths = [Path(name) for name in glob(uri)] or [Path(uri)]
    files = [path for root in paths for path in (root.rglob("*") if root.is_dir() else [root])]
    files = sorted(path for path in files if path.is_file())
    if not files or any(kind_of(path.name, None) != Kind(".txt", "") for path in files):
        return None
    with files[0].open(encoding="utf-8", errors="replace") as file:
        text = file.read(SAMPLED_TEXT)
    tokens_per_byte = len(tokenizer.encode(text).ids) / max(1, len(text.encode()))
    return tokens_per_byte * sum(path.stat().st_size for path in files)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value, of messages without the names of who speaks."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in NO_CONTENT:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _rows_in(fs: Any, name: str, kind: Kind) -> int:
    """Return the rows of a file. Raises _TooManyError, and OSError, ValueError or csv.Error for a damaged one."""
    with fs.open(name, "rb") as raw:
        if kind.kind == ".parquet":
            import pyarrow.parquet as pq

            return int(pq.ParquetFile(raw).metadata.num_rows)
        if kind.kind == ".arrow":
            return sum(batch.num_rows for batch in batches_in(raw))
        lines = _bounded(plain_bytes(raw, kind))
        if kind.kind in (".csv", ".tsv"):
            csv.field_size_limit(LINE_BYTES)  # Python's own limit is 128 KiB
            texts = (line.decode("utf-8", "replace") for line in lines)
            result = csv.reader(texts, delimiter="\t" if kind.kind == ".tsv" else ",")
            return max(0, sum(1 for values in result if values) - 1)
        first = next((line for line in lines if line.strip()), b"")
        if not begins_list(first):
            return int(bool(first)) + sum(1 for line in lines if line.strip())
    if is_cut(fs, name, kind):
        raise _TooManyError
    return sum(1 for _ in rows_of(fs, name, kind))


def _bounded(file: Any) -> Iterator[bytes]:
    """Yield the lines of a file. Raises _TooManyError beyond MOST bytes."""
    read = 0
    while line := file.readline(LINE_BYTES):
        read += len(line)
        if read > MOST:
            raise _TooManyError
        yield line

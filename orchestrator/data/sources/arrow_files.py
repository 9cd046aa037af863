"""Datasets written by Hugging Face's `Dataset.save_to_disk`: a folder of Arrow files and a state.json.

A file is an Arrow IPC stream: a schema, then record batches. It has no index, so a span is given by the byte at which
a batch begins, and the byte at which a batch ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from orchestrator.config.errors import InputError
from orchestrator.config.fields import keys_of
from orchestrator.storage.retry import Retry

STATE, SPLITS = "state.json", "dataset_dict.json"
"""State files: in the folder of a dataset, and in that of several splits."""
BATCH = "record batch"
SCHEMA = "schema"
MARK = b"ARROW1\0\0"
"""The first bytes of Arrow's file format, which Feather files share."""
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end mark after the last batch of a complete stream."""


def saved_files(fs: Any, folder: str, where: str) -> list[str] | None:
    """Return the files of a dataset saved in `folder`, in order; None for other folders.

    Raises InputError for a folder of several splits, whose names it lists, and for a dataset whose row order differs
    from that of the files.
    """
    folder = folder.rstrip("/")
    retry = Retry()
    if retry(fs.isfile, f"{folder}/{SPLITS}"):
        splits = _json(fs, f"{folder}/{SPLITS}", where).get("splits") or []
        hint = f"name one of them, as in {where.split()[-1].rstrip('/')}/{splits[0] if splits else 'train'}"
        raise InputError(f"holds the splits {', '.join(map(str, splits))}", where, hint)
    if not retry(fs.isfile, f"{folder}/{STATE}"):
        return None
    state = _json(fs, f"{folder}/{STATE}", where)
    if state.get("_indices_data_files"):
        raise InputError("reads its rows in an undefined order", where, "save it after flatten_indices()")
    try:
        return [f"{folder}/{file['filename']}" for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"has a {STATE} without files", where, "save the dataset again") from None


def _json(fs: Any, path: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(Retry()(fs.cat_file, path))
    except ValueError:
        raise InputError(f"{path} is not JSON", where, "save the dataset again") from None
    return content if isinstance(content, dict) else {}


def schema_of(file: BinaryIO) -> pa.Schema:
    """Return the schema of an Arrow file. Raises OSError or ValueError for other files."""
    file.seek(_begin(file))
    return pa.ipc.open_stream(pa.PythonFile(file, mode="r")).schema


def _begin(file: BinaryIO) -> int:
    """Return the byte at which the stream begins. Arrow's file format is a stream between a mark and an index."""
    file.seek(0)
    return len(MARK) if file.read(len(MARK)) == MARK else 0


def label_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """Return the names of the labels in a column, or at a path into one, in the order of their numbers.

    Hugging Face's datasets store the names of a ClassLabel with a table's schema. Empty without names.
    """
    stored = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(stored)["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return ()
    return names_of_labels(features, column)


def names_of_labels(features: Any, column: str) -> tuple[str, ...]:
    """Return the names of the labels in a column, or at a path into one, that a dataset's `features` give; empty
    without names.
    """
    feature = features[column] if column in features else _feature_at(features, column)
    while isinstance(feature, dict) and isinstance(inner := feature.get("feature"), dict):
        feature = inner
    names = (
        feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    )
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _feature_at(features: Any, path: str) -> Any:
    """Return the features at a path; None without any."""
    try:
        keys = keys_of(path)
    except ValueError:
        return None
    feature = features
    for key in keys:
        while isinstance(feature, dict) and key not in feature and "feature" in feature:
            feature = feature["feature"]
        if isinstance(feature, dict) and isinstance(key, str) and key in feature:
            feature = feature[key]
        elif not (isinstance(key, int) or key.isdigit()):
            return None
    return feature


def batch_ends(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the byte at which the schema ends, and the end of each batch, with the number of rows before that byte.

    Raises OSError or ValueError if the file is damaged or truncated.
    """
    schema = schema_of(file)
    rows = 0
    last = 0
    for message, end in _messages(file, _begin(file)):
        if message.type not in (SCHEMA, BATCH):
            raise _encoded(message)
        if message.type == BATCH:
            rows += pa.ipc.read_record_batch(message, schema).num_rows
        yield end, rows
        last = end
        file.seek(end)
    file.seek(last)
    if not file.read(len(END)).startswith(END):
        raise ValueError("it is cut off")


def batches_in(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Yield all batches of a file. Raises OSError or ValueError for a damaged one."""
    file.seek(_begin(file))
    yield from pa.ipc.open_stream(pa.PythonFile(file, mode="r"))


def batches(file: BinaryIO, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches in bytes [start, stop) of a file. Raises OSError or ValueError, also if it ends before
    `stop`.
    """
    schema = schema_of(file)
    for message, end in _messages(file, start):
        if message.type not in (SCHEMA, BATCH):
            raise _encoded(message)
        if message.type == BATCH:
            yield pa.ipc.read_record_batch(message, schema)
        if end >= stop:
            return
        file.seek(end)
    raise ValueError("it is cut off")


def _encoded(message: Any) -> ValueError:
    return ValueError(f"it has a {message.type}, as files with dictionary-encoded columns do")


def _messages(file: BinaryIO, start: int) -> Iterator[tuple[Any, int]]:
    """Yield the messages from byte `start` on, each with the byte at which it ends."""
    file.seek(start)
    stream = pa.PythonFile(file, mode="r")
    while True:
        try:
            message = pa.ipc.read_message(stream)
        except EOFError:
            return
        yield message, file.tell()

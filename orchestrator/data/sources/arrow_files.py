"""Datasets that Hugging Face's `Dataset.save_to_disk` has written: a folder of Arrow files and a state.json.

A file is an Arrow IPC stream: a schema, then record batches. It has no index, so that a span of it is given by the byte
at which a batch begins and that at which another one ends.
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
"""In the folder of a dataset, and in that of several splits."""
BATCH = "record batch"
SCHEMA = "schema"
MARK = b"ARROW1\0\0"
"""How a file of Arrow's file format begins, which Feather files are too."""
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What follows the last batch of a stream that was written to its end."""


def saved_files(fs: Any, folder: str, where: str) -> list[str] | None:
    """The files of a dataset that was saved in `folder`, in their order; None if it is another folder.

    Raises InputError for a folder of several splits, which it names, and for a dataset whose rows are to be read in
    another order than that of the files.
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
        raise InputError("reads its rows in an order of its own", where, "save it after flatten_indices()")
    try:
        return [f"{folder}/{file['filename']}" for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"has a {STATE} without files", where, "save the dataset anew") from None


def _json(fs: Any, path: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(Retry()(fs.cat_file, path))
    except ValueError:
        raise InputError(f"{path} is not JSON", where, "save the dataset anew") from None
    return found if isinstance(found, dict) else {}


def schema_of(file: BinaryIO) -> pa.Schema:
    """The schema of an Arrow file. Raises OSError or ValueError if it is none."""
    file.seek(_begin(file))
    return pa.ipc.open_stream(pa.PythonFile(file, mode="r")).schema


def _begin(file: BinaryIO) -> int:
    """The byte at which the stream begins: Arrow's file format is a stream between a mark and an index."""
    file.seek(0)
    return len(MARK) if file.read(len(MARK)) == MARK else 0


def label_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """The names of the labels in a column, or at a path into one, in the order of their numbers: what Hugging Face's
    datasets note of a ClassLabel beside the schema of a table. Empty if there are none."""
    stored = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(stored)["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return ()
    found = features[column] if column in features else _feature_at(features, column)
    while isinstance(found, dict) and isinstance(inner := found.get("feature"), dict):
        found = inner
    names = found.get("names") if isinstance(found, dict) and found.get("_type") == "ClassLabel" else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _feature_at(features: Any, path: str) -> Any:
    """What features say at a path; None if nothing."""
    try:
        keys = keys_of(path)
    except ValueError:
        return None
    found = features
    for key in keys:
        while isinstance(found, dict) and key not in found and "feature" in found:
            found = found["feature"]
        if isinstance(found, dict) and isinstance(key, str) and key in found:
            found = found[key]
        elif not (isinstance(key, int) or key.isdigit()):
            return None
    return found


def batch_ends(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The byte at which the schema ends, and that at which each batch does, with the rows before that byte. Raises
    OSError or ValueError where the file is damaged or cut off."""
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
    """All batches of a file. Raises OSError or ValueError for one that is damaged."""
    file.seek(_begin(file))
    yield from pa.ipc.open_stream(pa.PythonFile(file, mode="r"))


def batches(file: BinaryIO, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """The batches in bytes [start, stop) of a file. Raises OSError or ValueError, also if it ends before `stop`."""
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
    return ValueError(f"it has a {message.type}, as of columns that are encoded by dictionaries")


def _messages(file: BinaryIO, start: int) -> Iterator[tuple[Any, int]]:
    """The messages from byte `start` on, each with the byte at which it ends."""
    file.seek(start)
    stream = pa.PythonFile(file, mode="r")
    while True:
        try:
            message = pa.ipc.read_message(stream)
        except EOFError:
            return
        yield message, file.tell()

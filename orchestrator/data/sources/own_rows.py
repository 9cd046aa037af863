"""Rows that a function of the user's own makes, as a `ray.data.Dataset`: written once, as Parquet files."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.data.config import Source
from orchestrator.data.quiet_logging import quiet
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.retry import Retry, storage_failed, transient
from orchestrator.storage.uri import is_local, local_path
from workloads.errors import WorkloadError
from workloads.own.object_reference import call, load, sources

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

MADE = ".made.json"
"""In the folder of the rows, written last: what they are. Without it the rows are not complete."""
PART = re.compile(r"part-\d{5,}\.parquet")
"""The name of a file of rows."""
BATCH = 4096
"""Rows of one write."""
FILE_BYTES = 2**25
"""Bytes of rows in memory after which the next file begins."""


def is_made(source: Source) -> bool:
    """Return whether the rows of a source with a function are complete. Raises InputError if storage fails."""
    folder_uri = _folder(source)
    with _storage_errors(folder_uri):
        fs, folder = open_file_system(folder_uri, TIMEOUT)
        return bool(Retry()(fs.isfile, f"{folder}/{MADE}"))


def make_rows(source: Source, where: str, tell: Callable[[str], None]) -> None:
    """Call the function of a source and write its rows. This process must be connected to Ray.

    The files have the order of the dataset, and names that depend on nothing else. A folder on a local disk appears
    when it is complete.

    Args:
        source: the source.
        where: its key in the job file, for messages.
        tell: called with a line about the progress.

    Raises:
        InputError: the function fails, returns no dataset, or its rows are empty or differ in their columns.
    """
    named = f"{where} {source.own}"
    dataset = _dataset(source, named)
    folder_uri = _folder(source)
    draft = f"{local_path(folder_uri)}.{uuid.uuid4().hex}.tmp" if is_local(folder_uri) else folder_uri
    try:
        with _storage_errors(folder_uri):
            fs, folder = open_file_system(draft, TIMEOUT)
            rows = _write(dataset, fs, folder, named, tell)
            content = {"own": str(source.own), "fingerprint": source.fingerprint, "rows": rows}
            Retry()(fs.pipe_file, f"{folder}/{MADE}", json.dumps(content).encode())
            if draft != folder_uri:
                _publish(draft, local_path(folder_uri))
    finally:
        if draft != folder_uri:
            shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _storage_errors(uri: str) -> Iterator[None]:
    """Raise InputError for an error of storage in the block."""
    try:
        yield
    except Exception as error:  # fsspec backends raise various errors
        if isinstance(error, InputError) or not storage_failed(error):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        kind = Unreachable if transient(error) else InputError
        raise kind(f"cannot be read or written ({reason})", f"data.cache {uri}", "check it") from None


def _folder(source: Source) -> str:
    return source.name.rpartition("/")[0]


def _publish(draft: str, uri: str) -> None:
    """Give a complete folder its name. If another process was faster, its folder stays: both hold the same rows.

    Rows of a process that was killed make way, and no other files do.
    """
    with contextlib.suppress(OSError):
        os.rename(draft, uri)
        return
    if os.path.exists(f"{uri}/{MADE}"):
        return
    for name in filter(PART.fullmatch, os.listdir(uri)):
        os.unlink(f"{uri}/{name}")
    try:
        os.rename(draft, uri)
    except OSError:
        hint = "remove the folder, or give another fingerprint"
        raise InputError(
            "is a folder with other files than rows of `own`", f"data.cache {uri}", hint
        ) from None


def _dataset(source: Source, where: str) -> Dataset:
    import ray

    assert source.own is not None
    try:
        _send_along(source.own.use)
        made = call(source.own.use, load(source.own.use), source.own.options)
    except WorkloadError as error:
        raise InputError(str(error), where) from None
    if not isinstance(made, ray.data.Dataset):
        raise InputError(f"returns {type(made).__name__}, not a ray.data.Dataset", where, "return one")
    made.context.enable_progress_bars = False
    made.context.execution_options.preserve_order = True  # otherwise the order depends on the time of tasks
    return made


def _send_along(reference: str) -> None:
    """Let Ray send the modules of own code to its workers as they are, because these have another path of modules."""
    import ray

    load(reference)
    for name in sources(reference):
        if (module := sys.modules.get(name)) is not None:
            ray.cloudpickle.register_pickle_by_value(module)


def _write(dataset: Dataset, fs: Any, folder: str, where: str, tell: Callable[[str], None]) -> int:
    """Write the rows as files of at most about FILE_BYTES, and return their number."""
    retry = Retry()
    for path in retry(fs.find, folder):
        if PART.fullmatch(path.rpartition("/")[2]):  # of a process that was killed
            retry(fs.rm_file, path)
    fs.makedirs(folder, exist_ok=True)
    rows = 0
    for number, tables in enumerate(_files(dataset, where)):
        retry(fs.pipe_file, f"{folder}/part-{number:05d}.parquet", _parquet(tables))
        rows += sum(table.num_rows for table in tables)
        tell(f"{where}: {rows} rows are written")
    if not rows:
        raise InputError("gives no rows", where, "return a dataset with rows")
    return rows


def _parquet(tables: Sequence[pyarrow.Table]) -> bytes:
    import pyarrow.parquet

    with io.BytesIO() as file:
        with pyarrow.parquet.ParquetWriter(file, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
        return file.getvalue()


def _files(dataset: Dataset, where: str) -> Iterator[list[pyarrow.Table]]:
    """Yield the rows of each file. Raises InputError if their columns differ."""
    schema: pyarrow.Schema | None = None
    tables: list[pyarrow.Table] = []
    for table in _tables(dataset, where):
        schema = schema or table.schema
        if table.schema != schema:
            problem = f"gives rows of different columns: {_columns(schema)}, and {_columns(table.schema)}"
            raise InputError(problem, where, "give all rows the same columns and types")
        tables.append(table)
        if sum(collected.nbytes for collected in tables) >= FILE_BYTES:
            yield tables
            tables = []
    if tables:
        yield tables


def _tables(dataset: Dataset, where: str) -> Iterator[pyarrow.Table]:
    """Yield the rows of a dataset in its order. Raises InputError if the pipeline fails."""
    from ray.exceptions import RayError

    try:
        with quiet([logging.getLogger("ray.data")], logging.CRITICAL):
            batches: Iterator[Any] = iter(dataset.iter_batches(batch_size=BATCH, batch_format="pyarrow"))
            yield from (table for table in batches if table.num_rows)
    except RayError as error:
        first = str(error).partition("\n\n")[0].strip()  # that of the user's code; Ray's own come after it
        why = first.splitlines()[-1] if first else type(error).__name__
        raise InputError(f"fails: {why.strip()[:300]}", where, "correct the function") from None


def _columns(schema: pyarrow.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)

"""Rows as TensorBoard's event files, in `tensorboard/` of the run directory."""

from __future__ import annotations

import io
import os
import posixpath
import struct
import time
from collections.abc import Iterator, Sequence

from orchestrator.observe.sinks.sink import SinkContext, metrics_of
from orchestrator.storage.retry import Retry
from orchestrator.storage.row_line import Row
from orchestrator.storage.run_directory import RunDir

FOLDER = "tensorboard"
PREFIX = "events.out.tfevents."
HEADER = struct.Struct("<QI")
"""The header of a record: the length of its data, and a checksum of that; a checksum of the data is behind it (4
bytes)."""
RETRY = Retry(attempts=5, first=0.2, cap=5.0, deadline=60.0)


LIBRARY = "tensorboard"


def build(context: SinkContext) -> TensorBoardSink:
    """See `Sink`."""
    return TensorBoardSink(context.run)


class TensorBoardSink:
    """Writes one record per step, all its metrics in it, so that a step is there as a whole or not at all.

    Each process starts a new file; on an object store, whose objects cannot grow, each call does.
    """

    last_event = 0

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = posixpath.join(run.path, FOLDER)
        self._path = ""
        if run.local:
            os.makedirs(self._folder, exist_ok=True)
        self._newest = 0  # the time in the name of the last file
        self.last_step = self._last_step()

    def rows(self, rows: Sequence[Row]) -> None:
        """See `Sink`."""
        if not rows:
            return
        if not self._path:
            self._path = self._new()
            self._add([_version()])
        again = [_restart(rows[0]["step"])] if rows[0]["step"] <= self.last_step else []
        self._add(again + [_record(row) for row in rows])
        self.last_step = rows[-1]["step"]
        if not self._run.local:
            self._path = ""

    def events(self, events: Sequence[Row]) -> None:
        """See `Sink`; it has no use for them."""

    def close(self) -> None:
        """See `Sink`."""

    def _new(self) -> str:
        # TensorBoard reads files by name, and goes back to none.
        self._newest = max(self._newest + 1, int(time.time()))
        return posixpath.join(self._folder, f"{PREFIX}{self._newest:010d}")

    def _add(self, records: Sequence[bytes]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        written = io.BytesIO()
        writer = RecordWriter(written)
        for record in records:
            writer.write(record)
        if self._run.local:
            with open(self._path, "ab") as file:
                file.write(written.getvalue())
        elif len(records) > 1 or records[0] != _version():
            RETRY(self._run.fs.pipe_file, self._path, written.getvalue())

    def _last_step(self) -> int:
        """The last step in the files that there are."""
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            names = sorted(self._run.fs.ls(self._folder, detail=False))
        except FileNotFoundError:
            return -1
        times = [name.rpartition(PREFIX)[2] for name in names]
        self._newest = max((int(match) for match in times if match.isdecimal()), default=0)
        for name in reversed(names):
            events = map(Event.FromString, _records(self._run.fs.cat_file(name)))
            if steps := [event.step for event in events if event.HasField("summary")]:
                return steps[-1]
        return -1


def _records(content: bytes) -> Iterator[bytes]:
    """The data of each whole record."""
    at = 0
    while at + HEADER.size <= len(content):
        length, _ = HEADER.unpack_from(content, at)
        start = at + HEADER.size
        if start + length + 4 > len(content):
            return  # it was torn
        yield content[start : start + length]
        at = start + length + 4


def _version() -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    return bytes(Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())


def _restart(step: int) -> bytes:
    """By which TensorBoard forgets that step and those after it."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return bytes(Event(step=step, session_log=SessionLog(status=SessionLog.START)).SerializeToString())


def _record(row: Row) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=key.replace(".", "/"), simple_value=value) for key, value in metrics_of(row).items()
    ]
    event = Event(wall_time=float(row["time"]), step=row["step"], summary=Summary(value=values))
    return bytes(event.SerializeToString())

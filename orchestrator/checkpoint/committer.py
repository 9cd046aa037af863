"""One writer's part in each commit: write its shard, leave a note for writer 0; writer 0 publishes.

Torch-free. Writers meet in the commit's own folder, where each writes a note with the records of its files. That needs
no process group and works on any store; the notes of another attempt have other names.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.checkpoint.retention import Retention, discard, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.store import Store
from orchestrator.config.errors import one_line

SLOWER_FACTOR = 10.0
"""Writer 0 waits for others at least this factor times what its own files took: all have about as much to write."""
WITHDRAWN = 4
"""So many failed saves are looked after; a writer is hardly further behind writer 0, since a save waits for the one
before the last."""


@dataclass(frozen=True)
class CommitOutcome:
    """What became of a save.

    Attributes:
        step: optimiser steps done.
        place: which store, as `Store.location`.
        state: "published" (writer 0), "written" (the other writers) or "failed".
        seconds: from the moment the bytes were in host memory.
        bytes: what this writer wrote.
        reason: one line if it failed, or if removing old commits failed.
    """

    step: int
    place: str
    state: str
    seconds: float
    bytes: int
    reason: str = ""


class Committer:
    """Writer `writer` of `writers` of the same commits.

    Writer 0 gives the others up when nothing new has come into the commit's folder for `patience` seconds, or longer if
    its own files took long; one that has said in another way that its save failed, at once. The whole wait is bounded,
    since there is only so much state to come. A rank that dies ends its gang and this writer with it, so a missing note
    means slow storage.
    """

    def __init__(
        self,
        store: Store,
        writer: int,
        writers: int,
        retention: Retention | None = None,
        patience: float = 120.0,
    ) -> None:
        self.store, self.writer, self.writers = store, writer, writers
        self.retention, self.patience = retention or Retention(), patience
        self.failed: dict[int, int] = {}
        """The last step whose save failed, by writer: storage that is full may have no room for the note that says so.
        Another thread may set it."""
        self._withdrawn: deque[int] = deque(maxlen=WITHDRAWN)

    def commit(self, step: int, pieces: list[RawPiece], meta: dict[str, Any]) -> CommitOutcome:
        """Write the shard, then the note or the manifest. Never raises: a failed save is withdrawn and reported."""
        began = time.monotonic()
        size = sum(len(piece.data) for piece in pieces)
        state, reason = ("written" if self.writer else "published"), ""
        try:
            self._discard_withdrawn()
            records = self.store.write_raw(step, self.writer, pieces)
            wrote = time.monotonic() - began
            if self.writer:
                self._write_note(step, {"records": records})
            else:
                self.store.publish(
                    step, records + self._gather(step, max(self.patience, SLOWER_FACTOR * wrote)), meta
                )
                self._discard_withdrawn()  # of which the others, whose notes have come, write no more
                self._withdrawn.clear()
                reason = self._prune()
        except Exception as error:
            state, reason = "failed", one_line(error)
            self._withdraw(step, reason)
        return CommitOutcome(step, self.store.location, state, time.monotonic() - began, size, reason)

    def _note_path(self, step: int, writer: int) -> str:
        return f"{commit_folder(step)}/records-{writer:05d}-{self.store.attempt}.json"

    def _write_note(self, step: int, note: dict[str, Any]) -> None:
        data = json.dumps(note, separators=(",", ":")).encode()
        self.store.retry(self.store.backend.replace, self._note_path(step, self.writer), data)

    def _gather(self, step: int, patience: float) -> list[dict[str, Any]]:
        """The records of all other writers, waited for until nothing new has come for `patience` seconds."""
        missing = {self._note_path(step, writer): writer for writer in range(1, self.writers)}
        records: list[dict[str, Any]] = []
        end, pause = time.monotonic() + patience, 0.005
        before: dict[str, int] = {}
        while missing:
            failed = self.failed  # before it is looked, for a note may come between
            listed = self.store.retry(self.store.backend.list, commit_folder(step))
            present = {path: size for path, size in listed.items() if f"-{self.store.attempt}" in path}
            if present != before:
                before, end = present, time.monotonic() + patience
            for path in missing.keys() & present.keys():
                note = json.loads(self.store.retry(self.store.backend.read, path))
                writer = missing.pop(path)
                if "failed" in note:
                    raise RuntimeError(f"writer {writer}: {note['failed']}")
                records += note["records"]
            if gone := sorted(writer for writer in missing.values() if failed.get(writer, -1) >= step):
                raise RuntimeError(f"writers {gone} have failed, and could not write that down")
            if missing and time.monotonic() > end:
                raise TimeoutError(f"writers {sorted(missing.values())} wrote nothing in {patience:.3g} s")
            if missing:
                time.sleep(pause)
                pause = min(pause * 1.5, 1.0)
        return records

    def _prune(self) -> str:
        """Remove old commits, after the new one is published; a failure does not undo that and is returned as text."""
        try:
            prune(self.store, self.retention)
        except Exception as error:
            return f"old commits were not removed: {one_line(error)}"
        return ""

    def _withdraw(self, step: int, reason: str) -> None:
        """Remove what was written, best effort: the storage that has just failed may fail again; `prune` runs later."""
        try:
            if self.writer:
                self._write_note(step, {"failed": reason})
            else:
                self._withdrawn.append(step)
                discard(self.store, step)
        except Exception:
            return

    def _discard_withdrawn(self) -> None:
        """Remove what the other writers wrote of the last failed steps after those were withdrawn: storage that is full
        needs the room, and `prune` comes only after a commit."""
        with suppress(Exception):
            for step in self._withdrawn:
                discard(self.store, step)

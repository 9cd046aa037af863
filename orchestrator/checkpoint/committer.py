"""One writer's part in each commit. Every writer writes its shard and a note; writer 0 gathers the notes and publishes.

The notes are files in the commit's folder, with the records of a writer's shard files. This needs no process group and
works on any store. Notes of other attempts have other names. The module does not import torch.
"""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.checkpoint.retention import Retention, discard, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import one_line

SLOWER_FACTOR = 10.0
"""Writer 0 waits for the others at least this many times as long as its own files took: shards are about equal."""
WITHDRAWN = 4
"""How many failed saves writer 0 keeps cleaning up. Other writers are hardly further behind, because a save waits for
the one before the last."""


@dataclass(frozen=True)
class CommitOutcome:
    """The outcome of a save.

    Attributes:
        step: optimiser steps done.
        place: the store, as `Store.location`.
        state: "published" (writer 0), "written" (the other writers) or "failed".
        seconds: the time since the bytes were in host memory.
        bytes: how many bytes this writer wrote.
        reason: one line if it failed, or if removing old commits failed.
    """

    step: int
    place: str
    state: str
    seconds: float
    bytes: int
    reason: str = ""


class Committer:
    """Writer `writer` of `writers` that make the same commits.

    Writer 0 gives up on a commit when no new file has arrived in its folder for `patience` seconds, or longer if its
    own files took long. It gives up at once on a writer in `failed`. A rank that dies ends its gang and this writer
    with it, so a missing note means slow storage. The whole wait is bounded, because the size of the state is.

    Attributes:
        failed: the last step whose save failed, by writer. Full storage may have no room for the note that would say
            so. Another thread may replace the dictionary.
    """

    def __init__(
        self,
        store: Store,
        writer: int,
        writers: int,
        retention: Retention | None = None,
        patience: float = 120.0,
    ) -> None:
        self.store = store
        self.writer = writer
        self.writers = writers
        self.retention = retention or Retention()
        self.patience = patience
        self.failed: dict[int, int] = {}
        self._withdrawn: deque[int] = deque(maxlen=WITHDRAWN)
        """The latest steps whose saves failed, at writer 0."""

    def commit(self, step: int, pieces: list[RawPiece], meta: dict[str, Any]) -> CommitOutcome:
        """Write the shard, and then the note or, at writer 0, the manifest.

        Never raises: a failed save is withdrawn, and its outcome says why.

        Args:
            step: optimizer steps done.
            pieces: what this writer saves.
            meta: as in `Store.publish`. Only writer 0 uses it.
        """
        began = time.monotonic()
        size = sum(len(piece.data) for piece in pieces)
        state = "written" if self.writer else "published"
        reason = ""
        try:
            self._discard_withdrawn()
            records = self.store.write_raw(step, self.writer, pieces)
            wrote = time.monotonic() - began
            if self.writer:
                self._write_note(step, {"records": records})
            else:
                others = self._gather(step, max(self.patience, SLOWER_FACTOR * wrote))
                self.store.publish(step, records + others, meta)
                self._discard_withdrawn()  # the other writers have moved on to this step
                self._withdrawn.clear()
                reason = self._prune()
        except Exception as error:
            state = "failed"
            reason = one_line(error)
            self._withdraw(step, reason)
        return CommitOutcome(
            step,
            self.store.location,
            state=state,
            seconds=time.monotonic() - began,
            bytes=size,
            reason=reason,
        )

    def _note_path(self, step: int, writer: int) -> str:
        return f"{commit_folder(step)}/records-{writer:05d}-{self.store.attempt}.json"

    def _write_note(self, step: int, note: dict[str, Any]) -> None:
        data = json.dumps(note, separators=(",", ":")).encode()
        self.store.retry(self.store.backend.replace, self._note_path(step, self.writer), data)

    def _gather(self, step: int, patience: float) -> list[dict[str, Any]]:
        """Wait for the records of all other writers.

        Raises:
            RuntimeError: a writer has failed.
            TimeoutError: no new file has arrived for `patience` seconds.
        """
        missing = {self._note_path(step, writer): writer for writer in range(1, self.writers)}
        records: list[dict[str, Any]] = []
        end = time.monotonic() + patience
        pause = 0.005
        before: dict[str, int] = {}
        while missing:
            failed = self.failed  # read before the listing, because a note may arrive in between
            listed = self.store.retry(self.store.backend.list, commit_folder(step))
            present = {path: size for path, size in listed.items() if f"-{self.store.attempt}" in path}
            if present != before:
                before = present
                end = time.monotonic() + patience
            arrived = sorted(missing.keys() & present.keys())
            for path, raw in zip(arrived, self.store.many(self._read, arrived), strict=True):
                note = json.loads(raw)
                writer = missing.pop(path)
                if "failed" in note:
                    raise RuntimeError(f"writer {writer}: {note['failed']}")
                records += note["records"]
            if failed_writers := sorted(
                writer for writer in missing.values() if failed.get(writer, -1) >= step
            ):
                raise RuntimeError(f"writers {failed_writers} failed and could not report it")
            if missing and time.monotonic() > end:
                raise TimeoutError(f"writers {sorted(missing.values())} wrote nothing in {patience:.3g} s")
            if missing:
                time.sleep(pause)
                pause = min(pause * 1.5, 1.0)
        return records

    def _read(self, path: str) -> bytes:
        return self.store.retry(self.store.backend.read, path)

    def _prune(self) -> str:
        """Remove old commits after the new one is published. Return why that failed; the new commit stands."""
        try:
            prune(self.store, self.retention)
        except Exception as error:
            return f"old commits were not removed: {one_line(error)}"
        return ""

    def _withdraw(self, step: int, reason: str) -> None:
        """Remove what was written, as far as storage allows. `prune` removes the rest later."""
        try:
            if self.writer:
                self._write_note(step, {"failed": reason})
            else:
                self._withdrawn.append(step)
                discard(self.store, step)
        except Exception:
            return

    def _discard_withdrawn(self) -> None:
        """Remove what other writers wrote for failed steps after those were withdrawn.

        Full storage needs the room, and `prune` runs only after a commit.
        """
        with suppress(Exception):
            for step in self._withdrawn:
                discard(self.store, step)

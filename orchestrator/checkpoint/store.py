"""The commits of a run: written by many, published once, found again after any crash."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint import shard as shards
from orchestrator.checkpoint.manifest import (
    CommitManifest,
    CorruptCommit,
    folder,
    parse,
    published,
)
from orchestrator.checkpoint.merge import assemble
from orchestrator.checkpoint.snapshot_backend import PeerBackend
from orchestrator.checkpoint.verify import damage, spans
from orchestrator.job.errors import InputError
from orchestrator.storage.backend import Backend
from orchestrator.storage.file_names import FENCE, MANIFEST
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.retry import Retry

if TYPE_CHECKING:
    from orchestrator.checkpoint.pieces import TensorPiece
    from orchestrator.checkpoint.reader import Reader


class Store:
    """Commits below one fsspec URI (`<run>/checkpoints`). Every storage call is retried within bounds.

    A commit exists when its manifest does. Every shard file has a name of its own, so that a writer that
    outlived its attempt can touch nothing that a later one published.
    """

    def __init__(
        self,
        uri: str,
        *,
        attempt: str = "",
        retry: Retry | None = None,
        block_bytes: int = 1 << 20,
        file_bytes: int = 256 << 20,
        threads: int = 4,
        timeout: float = 30.0,
    ) -> None:
        """
        Args:
            uri: a directory or any fsspec URI.
            attempt: lower-case letters and digits; equal for the writers of one gang, new with every start.
            retry: bounds for each storage call.
            block_bytes: a checksum is kept for each block of so many bytes of a chunk.
            file_bytes: a writer's pieces are spread over files of about this size.
            threads: files written and read at once.
            timeout: seconds that a small call to a remote store may take; large ones get more by their size.
        """
        self.uri = uri
        # the address of peers holds their token, which no message should
        self.place = "peer memory" if uri.startswith("peers://") else uri.rstrip("/")
        self.attempt = attempt or uuid.uuid4().hex[:12]
        self.backend: Backend
        self.backend = PeerBackend(uri, timeout) if uri.startswith("peers://") else open_backend(uri, timeout)
        self.retry = retry or Retry()
        self.skipped: list[tuple[int, str]] = []
        self.block_bytes, self.file_bytes, self.threads = block_bytes, file_bytes, threads
        self.timeout = timeout

    def settings(self) -> dict[str, Any]:
        """JSON-able arguments of an equal store in another process."""
        return {
            "uri": self.uri,
            "attempt": self.attempt,
            "retry": {name: value for name, value in asdict(self.retry).items() if name != "give_up"},
            "block_bytes": self.block_bytes,
            "file_bytes": self.file_bytes,
            "threads": self.threads,
            "timeout": self.timeout,
        }

    # -- writing

    def write_shard(self, step: int, shard: int, pieces: Iterable[TensorPiece]) -> list[dict[str, Any]]:
        """Write one writer's pieces durably; what is returned goes to `publish`.

        Args:
            step: optimiser steps done.
            shard: any number, distinct between writers; it is part of file names and means nothing on load.
            pieces: which part of which tensor; replicas are written by one writer only.

        Returns:
            One JSON-able record a file: its name, size, checksums and chunks.
        """
        return self.write_raw(step, shard, [piece.raw() for piece in pieces])

    def write_raw(self, step: int, shard: int, pieces: Iterable[shards.RawPiece]) -> list[dict[str, Any]]:
        """`write_shard` from plain bytes."""

        def write(group: list[shards.RawPiece]) -> dict[str, Any]:
            # each try has a file of its own: what a lost request does later can harm nothing
            def attempt() -> dict[str, Any]:
                name = f"shard-{shard:05d}-{self.attempt}-{uuid.uuid4().hex[:8]}.safetensors"
                cut = [panel for piece in group for panel in shards.panels(piece, self.block_bytes)]
                buffers, record = shards.layout(name, cut, self.block_bytes)
                self.backend.write(f"{folder(step)}/{name}", buffers)
                return record

            return self.retry(attempt)

        groups = list(shards.split(pieces, self.file_bytes))
        if len(groups) < 2:
            return [write(group) for group in groups]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(write, groups))

    def publish(self, step: int, records: list[dict[str, Any]], meta: dict[str, Any]) -> CommitManifest:
        """Make a commit of what all writers wrote. Called once, after all of them are done.

        Args:
            step: optimiser steps done.
            records: what the `write_shard` calls returned, joined.
            meta: JSON-able; "position" and "receipt" are required and become fields of the manifest.

        Raises:
            InputError: chunks overlap or leave holes, a file is missing, the step is committed already, or a later
                attempt has taken over (see `fence`).
        """
        path = f"{folder(step)}/{MANIFEST}"
        commit = assemble(step, records, meta, self._where(step))
        present = self.retry(self.backend.list, folder(step))
        for name, entry in commit.files.items():
            if present.get(f"{folder(step)}/{name}") != entry.size:
                raise InputError(f"{name} is missing or cut short", self._where(step), "save again")
        data = commit.to_bytes()
        self._refuse_fenced(commit)
        try:
            self.retry(self.backend.publish, path, data)
        except FileExistsError:
            self._settle(commit, path, data)
        with contextlib.suppress(OSError):  # a hint for people: nothing here reads it
            self.retry(self.backend.replace, "LATEST", f"{folder(step)}\n".encode())
        return commit

    def fence(self, attempt: int) -> None:
        """Let nobody publish but that attempt of the run, and later ones: the gang of an earlier one may be at work
        behind a cut network, where nobody can end it, and reach this store. Its numbers are in `meta["attempt"]`."""
        self.retry(self.backend.replace, FENCE, f"{attempt}\n".encode())

    def fenced(self) -> int:
        """The attempt that alone may publish, 0 if none has been named or what names it is damaged."""
        try:
            return int(self.retry(self.backend.read, FENCE))
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return 0

    def _refuse_fenced(self, commit: CommitManifest) -> None:
        fence = self.fenced()
        if commit.meta.get("attempt", fence) < fence:
            hint = "nothing: this one has lost its place"
            raise InputError(f"attempt {fence} has taken over", self._where(commit.step), hint)

    def _settle(self, commit: CommitManifest, path: str, data: bytes) -> None:
        """A manifest stands already: ours, whose answer was lost; a damaged one; one that an earlier attempt
        published just as it was fenced out; or another, sound one."""
        if self.retry(self.backend.read, path) == data:
            return
        if not self.verify(commit.step) and not self._is_older(commit):
            where, hint = self._where(commit.step), "rewind the store to an earlier step"
            raise InputError("this step is committed already", where, hint)
        self.retry(self.backend.remove, path)
        self.retry(self.backend.publish, path, data)

    def _is_older(self, commit: CommitManifest) -> bool:
        """Whether what stands in the place of a commit is of an earlier attempt of its run."""
        standing, ours = self.manifest(commit.step).meta.get("attempt"), commit.meta.get("attempt")
        return standing is not None and ours is not None and standing < ours

    # -- reading

    def steps(self) -> list[int]:
        """Steps that have a manifest, sound or not, ascending."""
        return sorted(published(self.retry(self.backend.list)))

    def manifest(self, step: int) -> CommitManifest:
        """The manifest of a step.

        Raises:
            CorruptCommit: it is damaged.
            InputError: there is none, or this version cannot read it.
        """
        try:
            raw = self.retry(self.backend.read, f"{folder(step)}/{MANIFEST}")
        except FileNotFoundError:
            raise InputError("there is no commit", self._where(step), f"steps: {self.steps()}") from None
        found = parse(raw, self._where(step))
        if found.step != step:
            raise CorruptCommit(f"{self._where(step)}: the manifest is of step {found.step}")
        return found

    def latest(self, at_most: int | None = None, deep: bool = True) -> CommitManifest | None:
        """The newest sound commit, None if there is none. Bad ones are passed over and named in `skipped`.

        Args:
            at_most: look only at this step and earlier ones.
            deep: check every byte against its checksum; otherwise only the manifest and the sizes of files.

        Raises:
            InputError: it is not damaged but must not be read (newer schema, reaches outside its folder).
        """
        self.skipped = []
        sizes = self.retry(self.backend.list)
        for step in sorted(published(sizes), reverse=True):
            if at_most is not None and step > at_most:
                continue
            try:
                found = self.manifest(step)
            except CorruptCommit as error:
                self.skipped.append((step, str(error)))
                continue
            problems = found.missing(sizes) or (self._check_bytes(found) if deep else [])
            if not problems:
                return found
            self.skipped.append((step, problems[0]))
        return None

    def verify(self, step: int) -> list[str]:
        """Every flipped bit, cut or missing file of a commit, a line each; empty if it is sound."""
        try:
            found = self.manifest(step)
        except CorruptCommit as error:
            return [str(error)]
        sizes = self.retry(self.backend.list, folder(step))
        return found.missing(sizes) + self._check_bytes(found)

    def reader(self, manifest: CommitManifest) -> Reader:
        """Slices of a commit's tensors."""
        from orchestrator.checkpoint.reader import Reader

        return Reader(self.backend, self.retry, folder(manifest.step), manifest)

    def _check_bytes(self, commit: CommitManifest) -> list[str]:
        with ThreadPoolExecutor(self.threads) as pool:
            found = pool.map(
                lambda item: damage(self.backend, self.retry, commit, *item), spans(commit).items()
            )
            return [line for lines in found for line in lines]

    def _where(self, step: int) -> str:
        return f"{self.place}/{folder(step)}"

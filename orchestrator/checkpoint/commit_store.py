"""The store of a run's commits. Many processes write a commit, one publishes it, and then it survives any crash."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.checkpoint import shard as shards
from orchestrator.checkpoint.compact import checksum
from orchestrator.checkpoint.manifest import (
    CommitManifest,
    CorruptCommit,
    Span,
    commit_folder,
    parse_manifest,
    published_steps,
)
from orchestrator.checkpoint.merging import merge_records
from orchestrator.config.errors import InputError
from orchestrator.storage.backend import Backend
from orchestrator.storage.file_names import ATTEMPT_FILE, MANIFEST
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.retry import LostBytes, Retry, read_stored

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from orchestrator.checkpoint.chunks import FileEntry
    from orchestrator.checkpoint.pieces import TensorPiece
    from orchestrator.checkpoint.reader import Reader


READ_BYTES = 16 << 20
"""Bytes of a file that are read at a time to verify it."""


def checksummed_ranges(commit: CommitManifest) -> tuple[list[str], dict[str, Iterator[Span]]]:
    """Return the ranges that have a checksum, in order, by file. Together they cover the file.

    Also returns a line for each table of chunks that cannot be read or contradicts the rest of the manifest; the ranges
    of its chunks are left out.
    """
    import numpy as np

    problems: list[str] = []
    tables = []
    for table in commit.tables:
        try:
            _ = table.columns
        except (CorruptCommit, InputError) as error:
            problems.append(str(error))
        else:
            tables.append(table)
    columns = np.concatenate(
        [np.stack([table.columns[1], table.columns[2]]) for table in tables] or [np.empty((2, 0), np.int64)],
        axis=1,
    )
    # By file, then by offset, so that each file is read once from its beginning to its end.
    order = np.lexsort([columns[1], columns[0]])
    edges = np.searchsorted(columns[0][order], np.arange(len(commit.files) + 1)).tolist()
    first = np.cumsum([0, *(table.columns.shape[1] for table in tables)])

    def spans(entry: FileEntry, rows: NDArray[np.int64]) -> Iterator[Span]:
        yield 0, entry.header_bytes, entry.header, "the header"
        for row in rows.tolist():
            number = int(np.searchsorted(first, row, side="right")) - 1
            table = tables[number]
            mine = row - int(first[number])
            chunk = table.chunk(mine)
            name = table.kinds[int(table.columns[0, mine])][0]
            end = chunk.offset + int(table.bytes_of[mine])
            for block, expected in enumerate(chunk.blocks):
                at = chunk.offset + block * commit.block_bytes
                yield at, min(at + commit.block_bytes, end), expected, f"{name} block {block}"

    return problems, {
        name: spans(entry, order[low:high])
        for (name, entry), low, high in zip(commit.files.items(), edges, edges[1:], strict=False)
    }


def damaged_ranges(
    backend: Backend, retry: Retry, commit: CommitManifest, file: str, ranges: Iterable[Span]
) -> list[str]:
    """Return a line for each range of a file whose checksum is wrong. Stops at a range that cannot be read.

    A missing file is not reported here, see `CommitManifest.wrong_files`.

    Args:
        backend: the files of the store.
        retry: repeats failed reads.
        commit: the manifest.
        file: name of the file.
        ranges: those of the file with their checksums, in order; together they cover it.
    """
    size = commit.file_sizes[file]
    lines: list[str] = []
    base = 0
    buffer = memoryview(b"")
    for low, high, expected, label in ranges:
        if high > base + len(buffer):
            base = low
            target = memoryview(bytearray(min(max(READ_BYTES, high - low), size - low)))
            try:
                path = f"{commit_folder(commit.step)}/{file}"
                buffer = target[: read_stored(retry, backend.read_into, path, low, target)]
            except FileNotFoundError:
                return []
            except LostBytes as error:
                unreadable = f"{file}: {label} at byte {low} cannot be read: {error.strerror}"
                return [*lines, unreadable]
        if checksum(buffer[low - base : high - base]) != expected:
            lines.append(f"{file}: {label} at byte {low} is damaged")
    return lines


KEEP_MORE = "let the run keep more by checkpoint.keep or checkpoint.keep_every, or wait for its end"
"""The hint of errors about a commit that a running job has removed."""
FEW = 8
"""Small files that are read or removed one after the other."""
AT_ONCE = 32
"""Small files that are read or removed at the same time, if there are more."""
T = TypeVar("T")
LOOKS = 5
"""How often the newest commit is looked for again when a running job removes commits meanwhile."""


class Store:
    """The commits below one path or fsspec URI (`<run>/checkpoints`). Every storage call is retried within bounds.

    A commit exists once its manifest exists. Every shard file has a unique name, so a writer that outlives its attempt
    cannot touch what a later attempt published. The module `retention` removes commits.

    Attributes:
        skipped: the step of each commit that the last call of `latest` passed over, and why.
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
            uri: a path or any fsspec URI.
            attempt: lower-case letters and digits; the same for all writers of a gang, new with every start.
            retry: retries of each storage call.
            block_bytes: bytes of a chunk that one checksum covers.
            file_bytes: target size of a shard file.
            threads: number of files written or read at the same time.
            timeout: seconds for a small call to a remote store; large ones get more, by their size.
        """
        self.uri = uri
        self.location = uri.rstrip("/")
        self.attempt = attempt or uuid.uuid4().hex[:12]
        self.backend: Backend = open_backend(uri, timeout)
        self.retry = retry or Retry()
        self.skipped: list[tuple[int, str]] = []
        self.block_bytes = block_bytes
        self.file_bytes = file_bytes
        self.threads = threads
        self.timeout = timeout
        self._sound_indexes: set[str] = set()
        """The names, which are unique, of index files whose checksums were right."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments to open an equal store in another process, as JSON."""
        return {
            "uri": self.uri,
            "attempt": self.attempt,
            "retry": {name: value for name, value in asdict(self.retry).items() if name != "give_up"},
            "block_bytes": self.block_bytes,
            "file_bytes": self.file_bytes,
            "threads": self.threads,
            "timeout": self.timeout,
        }

    def many(self, call: Callable[[str], T], paths: Collection[str]) -> list[T]:
        """Return `call(path)` for each path, in order. Up to `threads` calls run at the same time.

        Args:
            call: reads or writes one file.
            paths: the paths of the files.
        """
        if len(paths) <= FEW:
            return [call(path) for path in paths]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(call, paths))

    # -- writing

    def write_shard(self, step: int, shard: int, pieces: Iterable[TensorPiece]) -> list[dict[str, Any]]:
        """Write one writer's pieces durably, and return the records for `publish`.

        Args:
            step: optimiser steps done.
            shard: any number, distinct between writers. It is part of file names only.
            pieces: the pieces of tensors. Of replicas, only one writer writes.

        Returns:
            One record per file, as JSON: its name, size, checksums and chunks.
        """
        return self.write_raw(step, shard, [piece.raw() for piece in pieces])

    def write_raw(self, step: int, shard: int, pieces: Iterable[shards.RawPiece]) -> list[dict[str, Any]]:
        """Do what `write_shard` does, with the pieces as bytes.

        Args:
            step: the step of the commit.
            shard: the number of the shard.
            pieces: the pieces of tensors.
        """

        def write(group: list[shards.RawPiece]) -> dict[str, Any]:
            # every try writes a new file, so a delayed request of an earlier try cannot damage it
            def attempt() -> dict[str, Any]:
                name = f"shard-{shard:05d}-{self.attempt}-{uuid.uuid4().hex[:8]}.safetensors"
                cut = [panel for piece in group for panel in shards.panels(piece, self.block_bytes)]
                buffers, record = shards.file_content(name, cut, self.block_bytes)
                self.backend.write(f"{commit_folder(step)}/{name}", buffers)
                return record

            return self.retry(attempt)

        groups = list(shards.group_pieces(pieces, self.file_bytes))
        if len(groups) < 2:
            return [write(group) for group in groups]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(write, groups))

    def publish(self, step: int, records: list[dict[str, Any]], meta: dict[str, Any]) -> CommitManifest:
        """Publish a commit by writing its manifest. Call it once, after all writers are done.

        Args:
            step: optimiser steps done.
            records: the joined results of all `write_shard` calls.
            meta: JSON; "position" and "receipt" are required and become fields of the manifest.

        Raises:
            InputError: chunks overlap or leave holes, a file is missing, the step is committed already, or a later
                attempt has taken over (see `fence`).
        """
        path = f"{commit_folder(step)}/{MANIFEST}"
        commit, index = merge_records(step, records, meta, self._where(step))
        if index:  # before the checks, because it takes long and they must hold when the manifest is written
            commit = commit.with_index(self._write_index(step, index))
        # The order is what makes a commit atomic: shards and index are durable, then listed with their sizes, then the
        # fence is checked, and the manifest comes last. A crash at any point leaves a whole commit or none.
        present = self.retry(self.backend.list, commit_folder(step))
        for name, size in commit.file_sizes.items():
            if present.get(f"{commit_folder(step)}/{name}") != size:
                raise InputError(f"{name} is missing or cut short", self._where(step), "save again")
        self._check_fence(commit)
        data = commit.to_bytes()
        try:
            self.retry(self.backend.publish, path, data)
        except FileExistsError:
            self._publish_over(commit, path, data)
        with contextlib.suppress(OSError):  # for people only: the program never reads it
            self.retry(self.backend.replace, "LATEST", f"{commit_folder(step)}\n".encode())
        return commit

    def _write_index(self, step: int, index: bytes) -> str:
        """Write the index file of a commit durably, read it back, and return its name."""

        def attempt() -> str:
            name = f"index-{self.attempt}-{uuid.uuid4().hex[:8]}.bin"
            path = f"{commit_folder(step)}/{name}"
            self.backend.write(path, [index])
            if self.backend.read(path) != index:
                raise OSError(errno.EIO, "storage returned other bytes than were written", path)
            return name

        return self.retry(attempt)

    def fence(self, attempt: int) -> None:
        """Allow only this attempt of the run, and later ones, to publish.

        The gang of an earlier attempt may still run behind a network partition, where it cannot be stopped, and reach
        this store. A commit's attempt is in `meta["attempt"]`.
        """
        self.retry(self.backend.replace, ATTEMPT_FILE, f"{attempt}\n".encode())

    def fenced(self) -> int:
        """Return the first attempt that may publish; 0 without a fence, or if its file is damaged."""
        try:
            return int(self.retry(self.backend.read, ATTEMPT_FILE))
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return 0

    def _check_fence(self, commit: CommitManifest) -> None:
        fence = self.fenced()
        if commit.meta.get("attempt", fence) < fence:
            hint = "nothing to do: this attempt was replaced"
            raise InputError(f"attempt {fence} has taken over", self._where(commit.step), hint)

    def _publish_over(self, commit: CommitManifest, path: str, data: bytes) -> None:
        """Publish although a manifest exists already.

        It may be our own, if the answer to the first request was lost. A damaged one, or one that an earlier attempt
        published just before it was fenced, is replaced. Any other sound manifest is an error.
        """
        if self.retry(self.backend.read, path) == data:
            return
        if not self.verify(commit.step) and not self._is_from_earlier_attempt(commit):
            where, hint = self._where(commit.step), "rewind the store to an earlier step"
            raise InputError("this step is committed already", where, hint)
        # Removed and published again, not overwritten: `publish` fails if another attempt publishes in between.
        self.retry(self.backend.remove, path)
        self.retry(self.backend.publish, path, data)

    def _is_from_earlier_attempt(self, commit: CommitManifest) -> bool:
        """Whether the published commit of this step belongs to an earlier attempt of the run."""
        published = self.manifest(commit.step).meta.get("attempt")
        ours = commit.meta.get("attempt")
        return published is not None and ours is not None and published < ours

    # -- reading

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, sound or not, in ascending order."""
        return sorted(published_steps(self.retry(self.backend.list)))

    def manifest(self, step: int) -> CommitManifest:
        """Return the manifest of a step.

        Raises:
            CorruptCommit: it is damaged or cannot be read.
            InputError: it does not exist, or this version cannot read it.
        """
        try:
            return self._manifest(step)
        except FileNotFoundError:
            raise InputError("there is no commit", self._where(step), f"steps: {self.steps()}") from None

    def _manifest(self, step: int) -> CommitManifest:
        """As `manifest`, but raises FileNotFoundError if it does not exist."""
        try:
            raw = read_stored(self.retry, self.backend.read, f"{commit_folder(step)}/{MANIFEST}")
        except LostBytes as error:
            problem = f"{self._where(step)}: the manifest cannot be read: {error.strerror}"
            raise CorruptCommit(problem) from error

        def read(name: str, offset: int, target: memoryview) -> int:
            path = f"{commit_folder(step)}/{name}"
            return read_stored(self.retry, self.backend.read_into, path, offset, target)

        manifest = parse_manifest(raw, self._where(step), read)
        if manifest.step != step:
            raise CorruptCommit(f"{self._where(step)}: the manifest is of step {manifest.step} ({MANIFEST})")
        return manifest

    def latest(self, at_most: int | None = None, deep: bool = True) -> CommitManifest | None:
        """Return the newest sound commit, None without one. Unsound ones are skipped and listed in `skipped`.

        Args:
            at_most: consider only this step and earlier ones.
            deep: whether to verify every byte by its checksum, instead of only the manifest, the index
                file and the sizes of files.

        Raises:
            InputError: the newest commit is undamaged, but this version cannot read it, because of a newer schema or
                files outside its folder; or a running job removed one commit after another while they were read.
        """
        for _ in range(LOOKS):
            newest, is_gone = self._newest(at_most, deep)
            if not is_gone:
                return newest
        raise InputError("a running job removes each checkpoint while it is read", self.location, KEEP_MORE)

    def _newest(self, at_most: int | None, deep: bool) -> tuple[CommitManifest | None, bool]:
        """As `latest`, and whether a running job removed a listed commit, so that the list must be read again."""
        self.skipped = []
        sizes = self.retry(self.backend.list)
        for step in sorted(published_steps(sizes), reverse=True):
            if at_most is not None and step > at_most:
                continue
            try:
                manifest = self._manifest(step)
            except FileNotFoundError:
                # A running job has removed it, and the commit that replaces it may not have been listed.
                if step not in self.steps():
                    return None, True
                self.skipped.append((step, f"{self._where(step)}: the manifest is no file"))
                continue
            except CorruptCommit as error:
                self.skipped.append((step, str(error)))
                continue
            problems = self.problems(manifest, sizes) or (self._check_bytes(manifest) if deep else [])
            # Files of a commit that is being removed look like damage, and reading every byte takes long enough for a
            # removal.
            if (problems or deep) and step not in self.steps():
                return None, True
            if not problems:
                return manifest, False
            self.skipped.append((step, problems[0]))
        return None, False

    def problems(self, commit: CommitManifest, sizes: Mapping[str, int]) -> list[str]:
        """Return a line for each wrong file, or else for each damaged table of the index file. No shard is read.

        A right index file is read once. The folder is listed once more before a file counts as wrong, because a listing
        may have been made while the commit was published.

        Args:
            commit: the manifest of the commit.
            sizes: the sizes of the stored files in bytes, by path.
        """
        if lines := self._wrong_files(commit, sizes):
            return lines
        name, _ = commit.index
        if not name or name in self._sound_indexes:
            return []
        for _ in range(2):  # once more after a wrong checksum
            lines = damaged_ranges(self.backend, self.retry, commit, name, commit.index_ranges)
            if not lines:
                self._sound_indexes.add(name)
                break
        return lines

    def _wrong_files(self, commit: CommitManifest, sizes: Mapping[str, int]) -> list[str]:
        if not commit.wrong_files(sizes):
            return []
        return commit.wrong_files(self.retry(self.backend.list, commit_folder(commit.step)))

    def verify(self, step: int) -> list[str]:
        """Return a line for every damaged block and every short, missing or unreadable file of a commit.

        The list is empty for a sound commit.
        """
        try:
            manifest = self.manifest(step)
        except CorruptCommit as error:
            return [str(error)]
        sizes = self.retry(self.backend.list, commit_folder(step))
        return self._wrong_files(manifest, sizes) + self._check_bytes(manifest)

    def reader(self, manifest: CommitManifest) -> Reader:
        """Return a reader of the commit's tensors."""
        # imported here because it imports torch, which the process that writes commits must not load
        from orchestrator.checkpoint.reader import Reader

        return Reader(self.backend, self.retry, commit_folder(manifest.step), manifest)

    def _check_bytes(self, commit: CommitManifest) -> list[str]:
        problems, ranges = checksummed_ranges(commit)
        with ThreadPoolExecutor(self.threads) as pool:
            result = pool.map(
                lambda item: damaged_ranges(self.backend, self.retry, commit, *item), ranges.items()
            )
            return problems + [line for lines in result for line in lines]

    def _where(self, step: int) -> str:
        return f"{self.location}/{commit_folder(step)}"

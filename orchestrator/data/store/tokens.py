"""Reading prepared data: one memory-mapped stream of tokens per source."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.contents import ENTRY, documents_by_part
from orchestrator.data.prepare.shards import contents_name, ends_name
from orchestrator.data.samples.sections import published
from orchestrator.data.samples.sections.published import StoppedWaiting
from orchestrator.data.store import manifest
from orchestrator.data.store.blocks import RemoteShard, cache_for
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, TokenShard
from orchestrator.data.store.mapped_manifest import read_mapped
from orchestrator.data.store.node_copies import AGAIN, copies_of, derived_folder, downloaded
from orchestrator.data.store.verified_shard import DamagedShard, DataGone, VerifiedShard, quarantine
from orchestrator.storage.read_at_once import read_at_once
from orchestrator.storage.retry import Retry

if TYPE_CHECKING:
    from workloads.workload import Vocabulary

AT_ONCE = 16
"""Windows that are read from a store in parallel."""
MAPPED = 4096
"""Shards that are open at the same time; a process may map some ten thousand files."""
POLL = 0.5
"""Seconds between two checks for the next section of data that is still being prepared."""


class Tokens:
    """Read access to prepared data; made by `Tokens.open`. All tokens are verified, see `VerifiedShard`."""

    def __init__(
        self, folder: DataFolder, manifest: DataManifest, sections: int | None = None, keep: int | None = None
    ) -> None:
        """`sections` is the number of published sections of data that is still being prepared; None if it is
        complete.

        Raises DataGone if a shard is missing or damaged.
        """
        self.folder = folder
        self.manifest = manifest
        self.sections = sections
        self.keep = keep
        self._cache = None if folder.local else cache_for(manifest, keep, sections is not None)
        self._opened: OrderedDict[tuple[int, int], VerifiedShard | RemoteShard] = OrderedDict()
        """The most recently used shards by source and index."""
        self._guard = threading.Lock()
        self._take(manifest)

    @classmethod
    def open(cls, uri: str, retry: Retry | None = None, keep: int | None = None) -> Tokens:
        """Open the prepared data at `uri`, as far as it is published.

        Local shards are mapped in place. Remote shards are copied to the system's temporary folder, where they may
        take `keep` bytes, or half of the free space if None. If all fit, they are downloaded and verified once per
        node; otherwise single blocks are, when they are read. Raises DataGone if the data is missing or damaged.
        """
        folder = DataFolder(uri, retry)
        if commit := read_mapped(folder):
            return cls(folder, commit, None, keep)
        if so_far := published.so_far(folder):
            return cls(folder, *so_far, keep)
        raise DataGone("there is no prepared data", folder.uri, "make it with `orchestrator data prepare`")

    def await_section(self, number: int) -> None:
        """Wait until a section is published, unless the process is asked to stop.

        Raises StoppedWaiting, and DataGone if its shards are missing or damaged.
        """
        give_up = self.folder.retry.give_up
        while self.sections is not None and self.sections <= number:
            if section := published.read_section(self.folder, self.sections):
                self._take(published.joined(self.manifest, section))
                self.sections += 1
            elif give_up and give_up():
                raise StoppedWaiting(f"section {number} is not prepared yet")
            else:
                time.sleep(POLL)

    def _take(self, manifest: DataManifest) -> None:
        """Replace the manifest by one of as much or more data.

        Its shards are opened, unless there are too many: those are opened when they are read. Whole copies of remote
        shards are made now.
        """
        self.manifest = manifest
        self._ends = [np.cumsum(source.lengths) for source in manifest.sources]
        self._parts = [source.parts for source in manifest.sources]
        if self._cache is None and not self.folder.local:
            for shard in manifest.shards:
                downloaded(self.folder, manifest, shard)
        if self._cache is None and sum(map(len, self._ends)) <= MAPPED:
            for source, ends in enumerate(self._ends):
                for number in range(len(ends)):
                    self._shard(source, number)

    def _shard(self, source: int, number: int) -> VerifiedShard | RemoteShard:
        """Return a shard, opened. Raises DataGone if it is missing or has the wrong size."""
        with self._guard:
            if (source, number) not in self._opened:
                self._opened[source, number] = self._open(self.manifest.sources[source].shards[number])
                while len(self._opened) > MAPPED:
                    self._opened.popitem(last=False)
            self._opened.move_to_end((source, number))
            return self._opened[source, number]

    def _open(self, shard: TokenShard) -> VerifiedShard | RemoteShard:
        if self._cache is not None:
            return RemoteShard(self.folder, self.manifest.dtype, shard, self._cache)
        path = (
            Path(self.folder.at(shard.file))
            if self.folder.local
            else downloaded(self.folder, self.manifest, shard)
        )
        try:
            return VerifiedShard(path, self.manifest.dtype, shard)
        except ValueError as error:
            raise DataGone(str(error), self.folder.uri, AGAIN) from None

    @property
    def at_once(self) -> int:
        """How many windows are best read in parallel, because each waits for the store."""
        return 1 if self._cache is None else AT_ONCE

    def tokens_before(self, source: int, part: int) -> int:
        """Return the tokens of a source in the parts before the part of this number."""
        return self._before(source, int(np.searchsorted(self._parts[source], part)))

    def _before(self, source: int, shard: int) -> int:
        return int(self._ends[source][shard - 1]) if shard else 0

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self.manifest.sources)

    def length(self, source: int) -> int:
        """Return the number of tokens of a source."""
        return int(self._ends[source][-1]) if len(self._ends[source]) else 0

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) of a source, int64. They may span several shards."""
        ends = self._ends[source]
        if start < 0 or length < 0 or start + length > self.length(source):
            raise IndexError(
                f"tokens {start} to {start + length} of {self.length(source)} in source {source}"
            )
        result = np.empty(length, dtype=np.int64)
        number = int(np.searchsorted(ends, start, side="right"))
        filled = 0
        while filled < length:
            shard = self._shard(source, number)
            at = start + filled - (int(ends[number]) - len(shard))
            piece = shard.read(at, at + length - filled)
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return result

    def document_ends(self, source: int) -> np.ndarray:
        """Return the index after each document's closing token, int64 [documents], ascending.

        Raises DamagedShard if the index file is missing or damaged.
        """
        result = list(self.document_ends_by_part(source))
        return np.concatenate(result) if result else np.zeros(0, dtype=np.int64)

    def document_ends_by_part(self, source: int, among: range | None = None) -> Iterator[np.ndarray]:
        """Yield `document_ends` shard by shard, for all shards or those in `among`. Raises DamagedShard."""
        shards = self.manifest.sources[source].shards
        begin = 0
        if among is not None:
            shards = shards[among.start : among.stop]
            begin = self._before(source, among.start)
        indices = self._indices({ends_name(shard.file): shard.ends for shard in shards})
        for shard, data in zip(shards, indices, strict=True):
            yield np.frombuffer(data, "<u4").astype(np.int64) + begin
            begin += shard.tokens

    def shards_of(self, source: int, first: int, last: int) -> range:
        """Return the indices of a source's shards that belong to the parts [first, last)."""
        begin, end = np.searchsorted(self._parts[source], (first, last))
        return range(int(begin), int(end))

    def last_begun(self, source: int, shard: int) -> int:
        """Return the index of the last shard before this one in which a document ends; 0 without one."""
        while shard > 0 and not self.manifest.sources[source].shards[shard - 1].documents:
            shard -= 1
        return max(shard - 1, 0)

    def documents_until(self, source: int, shard: int) -> int:
        """Return the index after the last document that ends before this shard. Raises DamagedShard."""
        ends = list(self.document_ends_by_part(source, range(self.last_begun(source, shard), shard)))
        result = np.concatenate([[0], *ends])
        return int(result[-1])

    @property
    def digest(self) -> str:
        """A digest of the content: data with equal digests has the same tokens."""
        return self.manifest.digest

    @property
    def derived(self) -> Path:
        """The folder on this node's disk for files derived from the data."""
        return derived_folder(self.folder) or copies_of(self.manifest)

    def contents(self, source: int) -> np.ndarray:
        """Return bytes and hash of the text of each document of a source, `contents.ENTRY` [documents].

        Raises InputError for data before format 3, which lacks them, and DamagedShard if an index is missing or
        damaged.
        """
        return np.concatenate([np.zeros(0, ENTRY), *self.contents_by_part(source)])

    def contents_by_part(self, source: int, among: range | None = None) -> Iterator[np.ndarray]:
        """Yield `contents` shard by shard, for all shards or those in `among`: the documents that end in each. Raises
        as `contents`.
        """
        if self.manifest.format < 3:
            problem = f"has format {self.manifest.format}, which does not distinguish documents by their text"
            raise InputError(problem, self.folder.uri, "start another run, which prepares it again")
        shards = self.manifest.sources[source].shards
        before = 0
        if among is not None:  # the first of these documents may begin in an earlier shard
            first = self.last_begun(source, among.start)
            shards = shards[first : among.stop]
            before = among.start - first
        indices = self._indices({contents_name(shard.file): shard.contents for shard in shards})
        return islice(documents_by_part(indices), before, None)

    def _indices(self, sums: dict[str, str]) -> Iterator[bytes]:
        """Yield the files with these names and checksums, in order. Raises DamagedShard."""

        def read(name: str) -> bytes:
            return _companion_file(self.folder, name, xxhash.xxh3_64_hexdigest, sums[name])

        return read_at_once(read, sums, held=64)  # all of them together may exceed the memory

    def check(self) -> None:
        """Read and verify everything. Raises DamagedShard."""
        for number, ends in enumerate(self._ends):
            for index in range(len(ends)):
                self._shard(number, index).check()
            if self.manifest.format > 1:
                self.document_ends(number)
            if self.manifest.format > 2:
                self.contents(number)
        self.tokenizer()

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data. Raises DamagedShard if it is missing or damaged."""
        return Tokenizer.from_str(read_tokenizer(self.folder, self.manifest))

    def vocabulary(self) -> Vocabulary:
        """Return what an objective needs to know about the tokenizer."""
        from orchestrator.data.encoding.vocabulary import (
            vocabulary_of,  # imports torch, which reading tokens does not need
        )

        return vocabulary_of(self.tokenizer(), self.manifest)


def read_tokenizer(folder: DataFolder, manifest: DataManifest) -> str:
    """Return the tokenizer of prepared data as JSON. Raises DamagedShard if it is missing or damaged."""
    return _companion_file(
        folder, manifest.tokenizer, xxhash.xxh3_128_hexdigest, manifest.tokenizer_xxh3
    ).decode()


def _companion_file(folder: DataFolder, name: str, checksum: Callable[[bytes], str], expected: str) -> bytes:
    """Return a small file of the prepared data. It is quarantined if its recorded checksum does not match.

    Raises DamagedShard.
    """
    data = folder.read(name)
    if data is None or expected not in ("", checksum(data)):
        if folder.local:
            quarantine(Path(folder.at(name)))
        state = "is missing" if data is None else "is not what was written"
        raise DamagedShard(f"{folder.at(name)} {state}; it is made again from the text")
    return data


def problems(uri: str) -> list[str]:
    """Return one line for each problem of prepared data on this machine's disks, after reading every byte.

    Missing data and remote data are not problems: they are made again, or verified when downloaded.
    """
    try:
        folder = DataFolder(uri)
        if folder.local and folder.read(manifest.NAME) is not None:
            Tokens.open(uri).check()
    except (DamagedShard, InputError) as error:
        return [str(error)]
    return []

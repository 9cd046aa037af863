"""Write one part of the text as one token shard with a record."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer as tokenizers
from orchestrator.data.encoding.engines import Compared, Encoded, Engine, fast, reference
from orchestrator.data.encoding.framing import UNFRAMED, Framing, framed
from orchestrator.data.prepare.contents import ENTRY, ContentIndex
from orchestrator.data.prepare.named_tokens import NamedTokens
from orchestrator.data.prepare.part_text import goes_on, part_pieces
from orchestrator.data.sources import Part
from orchestrator.data.sources.documents import TextPiece
from orchestrator.data.sources.identity import part_key
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import FORMAT, DamagedManifest, TokenShard, read
from orchestrator.storage.read_at_once import read_at_once

if TYPE_CHECKING:
    from orchestrator.data.clean.cleaned_text import CleanedText
    from orchestrator.data.prepare.records import RecordKind


EVERY = 256
"""One of this many pieces of text is encoded by the reference too, and always the first piece of a part."""
COMPARED = 2**12
"""Number of characters that are compared. Both engines encode the beginning of a longer piece again, because the
reference takes as long for some long documents as the engine does for a whole part.
"""


class EngineDiffers(Exception):
    """The engine `name` returned other ids than the reference."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} gives other ids than the reference")
        self.name = name


class PartEncoder:
    """Encodes the pieces of a part, by the reference engine or, if `allowed`, by a faster one."""

    def __init__(self, text: str, number: int, allowed: bool = True, parse: bool = False) -> None:
        """`text` is the tokenizer's JSON. `number` seeds the choice of pieces to compare. With `parse`, the names of
        special tokens in a text are read as the tokens.
        """
        self._reference = reference(text, parse)
        self._engine: Engine = (fast(text, parse) if allowed else None) or self._reference
        self._draw = np.random.default_rng(number)
        self._first = True
        self._compared = [0, 0]

    @property
    def compared(self) -> Compared:
        """Name of the engine, and how much of the text was compared."""
        return Compared(self._engine.name, *self._compared)

    def encode(self, pieces: Sequence[TextPiece]) -> Encoded:
        """Return the ids of the pieces. Raises EngineDiffers."""
        encoded = self._engine.encode([piece.text for piece in pieces])
        if self._engine is not self._reference:
            for number in self._drawn(pieces):
                self._compare(encoded, number, pieces[number].text)
        return encoded

    def _drawn(self, pieces: Sequence[TextPiece]) -> Iterator[int]:
        for number, lot in enumerate(self._draw.random(len(pieces))):
            if lot < 1 / EVERY or self._first:
                yield number
            self._first = False

    def _compare(self, encoded: Encoded, number: int, text: str) -> None:
        if len(text) > COMPARED:
            text = text[:COMPARED]
            encoded = self._engine.encode([text])
            number = 0
        if not np.array_equal(encoded.of(number), self._reference.encode([text]).ids):
            raise EngineDiffers(self._engine.name)
        self._compared[0] += 1
        self._compared[1] += len(text.encode())


BATCH_BYTES = 2**20
"""Bytes of text that are tokenised in one call. This takes about fifty times as much memory."""
BLOCK_BYTES = 2**20
"""Bytes of a shard that one checksum covers."""
HELD_BYTES = 2**26
"""Bytes of a part's tokens that are kept in memory. More tokens, of a compressed file, wait in an unnamed file."""
MOST_TOKENS = 2**32 - 1
"""Maximum number of tokens of a shard, because its index of documents has 32 bits."""
REFUTED = "engine.json"
"""The file that names an engine that differed from the reference. The shards of that engine are made again."""


@dataclass(frozen=True)
class TokenFormat:
    """How text is written as tokens. It is the same for all shards of prepared data.

    Attributes:
        vocabulary: number of entries of the tokenizer.
        roles: ids of its tokens by role.
        version: format of the prepared data.
        kind: how rows become records, for an objective that reads records; None for plain text.
        framing: the special tokens around and within texts.
    """

    vocabulary: int
    roles: Mapping[str, int]
    version: int = FORMAT
    kind: RecordKind | None = None
    framing: Framing = UNFRAMED

    @property
    def dtype(self) -> str:
        """The smallest little-endian unsigned type that holds all ids: '<u2' or '<u4'. Words of records are always
        '<u4'.
        """
        return "<u2" if self.vocabulary <= 2**16 and self.kind is None else "<u4"


def shard_name(number: int) -> str:
    """Return the path of shard `number` within the prepared data."""
    return f"shards/{number:06d}.bin"


def record_name(number: int) -> str:
    """Return the path of the record of shard `number`."""
    return f"records/{number:06d}.json"


def ends_name(shard: str) -> str:
    """Return the path of a shard's index: the position after each document's last token, little-endian 32-bit, no
    header.
    """
    return shard.removesuffix(".bin") + ".ends"


def contents_name(shard: str) -> str:
    """Return the path of the lengths and hashes of a shard's documents, see `contents.ContentIndex`."""
    return shard.removesuffix(".bin") + ".contents"


def companion_sizes(shard: str, documents: int, data_format: int) -> dict[str, int]:
    """Return the sizes in bytes of the files next to a shard with this many documents."""
    ends = 4 * documents
    contents = ENTRY.itemsize * (documents + 1)
    companions = {ends_name(shard): (2, ends), contents_name(shard): (3, contents)}
    return {name: size for name, (since, size) in companions.items() if data_format >= since}


def make_shard(
    uri: str,
    number: int,
    part: Part,
    written: TokenFormat,
    fast: bool = True,
    cleaned: CleanedText | None = None,
    text: str = "",
) -> Callable[[], None]:
    """Encode shard `number` of the prepared data at `uri`; return the function that writes it and then its record.

    The record holds the numbers of tokens, documents and bytes of text, checksums, the count of each id, and the
    engine that encoded the text.

    Args:
        uri: the prepared data.
        number: the shard's number.
        part: the text.
        written: the token format.
        fast: allow a faster engine than the reference, as long as it returns the same ids. Records always use the
            reference.
        cleaned: the cleaned text; its documents replace those of the part.
        text: the tokenizer's JSON, for callers that make many shards.

    Raises InputError for text that cannot be read.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
    folder = DataFolder(uri)
    text = text or (folder.read("tokenizer.json") or b"").decode()
    if written.kind is not None:
        record_shard = _records(part, written, written.kind, text)
        return lambda: _write(folder, number, record_shard, FORMAT)
    refuted = refuted_engine(folder)
    draw = int(part_key(part)[:8], 16)  # so that a part's record is the same in every corpus
    parse = written.framing.parsed
    named = NamedTokens(text if written.version > 5 else "")
    try:
        encoder = PartEncoder(text, draw, fast and not refuted, parse)
        shard = _encoded(folder, part, encoder=encoder, written=written, cleaned=cleaned, named=named)
    except EngineDiffers as error:
        folder.write_json(REFUTED, {"engine": error.name})
        shard = _encoded(
            folder,
            part,
            encoder=PartEncoder(text, draw, False, parse),
            written=written,
            cleaned=cleaned,
            named=named,
        )
    return lambda: _write(folder, number, shard, written.version)


def refuted_engine(folder: DataFolder) -> str:
    """Return the engine that once differed from the reference on this text; empty if none did."""
    return str((folder.read_json(REFUTED) or {}).get("engine", ""))


def _encoded(
    folder: DataFolder,
    part: Part,
    encoder: PartEncoder,
    written: TokenFormat,
    cleaned: CleanedText | None,
    named: NamedTokens,
) -> _Shard:
    """Return the tokens of a part. Raises EngineDiffers and InputError."""
    named.clear()
    tokens = _Buffer(folder.uri if folder.local else None, written.dtype)
    ends: list[np.ndarray] = []
    contents = ContentIndex()
    counts = np.zeros(written.vocabulary, dtype=np.int64)
    text_bytes = length = 0
    rejected = Rejected()
    framing = written.framing
    eos = written.roles["eos"]
    sep = written.roles.get("sep")
    open_ = goes_on(part, cleaned) if framing.before else False
    for batch in _batches(part_pieces(part, written.version, cleaned, rejected)):
        ids, ends_of_batch = framed(
            encoder.encode(batch), batch, framing=framing, eos=eos, sep=sep, goes_on=open_
        )
        open_ = not batch[-1].ends
        ends.append(ends_of_batch + length)
        length += len(ids)
        counts += np.bincount(ids, minlength=written.vocabulary)
        if length > MOST_TOKENS:
            problem = f"has more than {MOST_TOKENS:,} tokens, and a compressed file is made as one part"
            raise InputError(problem, part[0].file.uri, "decompress it, or make several files of it")
        tokens.add(ids)
        text_bytes += sum(piece.bytes for piece in batch)
        for piece in batch:
            contents.add(piece)
            named.add(piece.text, framing.parsed)
    index = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    return _Shard(
        tokens.all(),
        index,
        contents=contents,
        bytes=text_bytes,
        counts=counts,
        rejected=rejected,
        named=named.to_json(),
        engine=encoder.compared,
    )


class _Buffer:
    """The tokens of a part. At most HELD_BYTES are in memory. There is one copy, because the tokens of a large part
    are most of a worker's memory.
    """

    def __init__(self, folder: str | None, width: str) -> None:
        """`width` is the dtype of a token. Tokens that do not fit wait on the disk of `folder`, or in the system's
        temporary files.
        """
        self._folder = folder
        self._width = width
        self._ids = bytearray()
        self._file: IO[bytes] | None = None

    def add(self, ids: np.ndarray) -> None:
        """Append ids."""
        self._ids += ids.astype(self._width).data
        if len(self._ids) >= HELD_BYTES:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - until it is written
            self._file.write(self._ids)
            self._ids.clear()

    def all(self) -> np.ndarray:
        """Return all tokens. Append nothing afterwards."""
        if self._file is None:
            return np.frombuffer(self._ids, self._width)
        self._file.write(self._ids)
        self._file.flush()
        return np.memmap(self._file, self._width, "r")


def _records(part: Part, written: TokenFormat, kind: RecordKind, text: str) -> _Shard:
    """Return the records of a part as its documents, each with a closing word."""
    # These import torch, which text does not need. It would cost every worker a second and 200 MiB.
    from orchestrator.data.prepare.records import records_of
    from workloads.record_format import CLOSE

    words_of: list[np.ndarray] = []
    ends: list[int] = []
    contents = ContentIndex()
    counts = np.zeros(written.vocabulary, dtype=np.int64)
    text_bytes = length = 0
    turns = {"rows": 0, "more": 0, "tokens": 0}
    goes_on = False
    rejected = Rejected()
    eos = written.roles["eos"]
    framing = written.framing
    encoder = tokenizers.encoder(text, framing.parsed)
    named = NamedTokens(text if written.version > 5 else "")
    records = (
        record
        for span in part
        for record in records_of(
            span,
            kind,
            encoder=encoder,
            eos=eos,
            rejected=rejected,
            data_format=written.version,
            framing=framing,
        )
    )
    for record in records:
        if not goes_on:  # a row may give several records
            named.add_record(record.text, framing.parsed)
        words_of.append(np.append(record.words, [CLOSE]).astype("<u4"))
        length += len(words_of[-1])
        ends.append(length)
        piece = TextPiece(record.text, True, len(record.text.encode()))
        contents.add(piece)
        text_bytes += piece.bytes
        counts += np.bincount(record.tokens, minlength=written.vocabulary)
        if record.goes_on:
            turns["rows"] += not goes_on
            turns["more"] += 1
            turns["tokens"] += len(record.words)
        goes_on = record.goes_on
    counts[eos] += (
        length - counts.sum()
    )  # every word that is not a token counts as the eos that each record has
    words = np.concatenate(words_of) if words_of else np.zeros(0, "<u4")
    return _Shard(
        words,
        np.array(ends),
        contents=contents,
        bytes=text_bytes,
        counts=counts,
        rejected=rejected,
        named=named.to_json(),
        turns=turns,
    )


class _Shard(NamedTuple):
    tokens: np.ndarray
    ends: np.ndarray
    contents: ContentIndex
    bytes: int
    counts: np.ndarray
    rejected: Rejected
    named: dict[str, dict[str, int]]
    engine: Compared | None = None
    turns: Mapping[str, int] = MappingProxyType({})


def _write(folder: DataFolder, number: int, shard: _Shard, data_format: int) -> None:
    """Write the files of a shard in parallel, because each waits for the disk or the store; then write its record."""
    data = shard.tokens.view(np.uint8).data
    name = shard_name(number)
    files: dict[str, bytes | memoryview] = {name: data}
    record: dict[str, Any] = {
        "tokens": len(shard.tokens),
        "documents": len(shard.ends),
        "bytes": shard.bytes,
        "xxh3": xxhash.xxh3_128_hexdigest(data),
        "counts": shard.counts.tolist(),
    }
    if shard.engine:
        record["engine"] = shard.engine.to_json()
    if data_format > 1:
        files[ends_name(name)] = index = shard.ends.astype("<u4").tobytes()
        record |= {"blocks": block_sums(data), "ends": xxhash.xxh3_64_hexdigest(index)}
    if data_format > 2:
        files[contents_name(name)] = listed = shard.contents.to_bytes()
        record["contents"] = xxhash.xxh3_64_hexdigest(listed)
    if rejected := shard.rejected.to_json():
        record["rejected"] = rejected
    if any(shard.turns.values()):
        record["turns"] = dict(shard.turns)
    if shard.named:
        record["named"] = shard.named
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(folder.write, files, files.values()))
    folder.write_json(record_name(number), record)


def block_sums(data: bytes | memoryview) -> str:
    """Return the checksums of a shard's blocks, concatenated."""
    return "".join(
        xxhash.xxh3_64_hexdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)
    )


def read_record(folder: DataFolder, number: int, data_format: int) -> dict[str, Any] | None:
    """Return the record of shard `number`; None if it is missing or damaged.

    `rejected` lists what was left out or repaired, `named` the names of special tokens in the text.
    """
    try:
        record = folder.read_json(record_name(number))
        counts = np.array(record.pop("counts"), dtype=np.int64)
        engine = record.pop("engine", None)
        rejected = record.pop("rejected", [])
        named = record.pop("named", {})
        TokenShard(file="", **record)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    needed = {key for key, since in (("ends", 2), ("contents", 3)) if data_format >= since}
    is_complete_record = counts.sum() == record["tokens"] and needed <= record.keys()
    details = {"counts": counts, "engine": engine, "rejected": rejected, "named": named}
    return {**record, **details} if is_complete_record else None


def is_complete(folder: DataFolder) -> bool:
    """Return whether `folder` holds prepared data with all files at their expected sizes."""
    try:
        data = read(folder)
    except DamagedManifest:
        return False
    if data is None:
        return False
    if data.own:  # the user's own data has no files here
        return True
    sizes = folder.sizes("")
    width = np.dtype(data.dtype).itemsize
    wanted = {shard.file: shard.tokens * width for shard in data.shards}
    for shard in data.shards:
        wanted |= companion_sizes(shard.file, shard.documents, data.format)
    sizes_match = all(sizes.get(name) == size for name, size in wanted.items())
    return sizes_match and sizes.get(data.tokenizer, 0) > 0


def unfinished(folder: DataFolder, parts: int, written: TokenFormat) -> list[int]:
    """Return the numbers of the shards that lack a file, have a file of the wrong size, or come from a refuted
    engine.
    """
    refuted = refuted_engine(folder)
    width = np.dtype(written.dtype).itemsize
    sizes = folder.sizes("shards")
    records = folder.sizes("records")

    def lacks(number: int) -> bool:
        if os.path.basename(record_name(number)) not in records:
            return True
        record = read_record(folder, number, written.version)
        shard = os.path.basename(shard_name(number))
        if record is None or (refuted and (record["engine"] or {}).get("name") == refuted):
            return True
        if sizes.get(shard) != record["tokens"] * width:
            return True
        companions = companion_sizes(shard, record["documents"], written.version)
        return any(sizes.get(name) != size for name, size in companions.items())

    return [number for number, yes in enumerate(read_at_once(lacks, range(parts))) if yes]


def _batches(items: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.bytes + 1  # an empty piece takes memory too
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch

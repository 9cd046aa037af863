"""One part of the text to one token shard with its record; all records to the manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from orchestrator.data import tokenizer as tokenizers
from orchestrator.data.documents import Piece, pieces
from orchestrator.data.files import Folder
from orchestrator.data.manifest import Manifest, PreparedSource, Shard
from orchestrator.data.sources import Part
from orchestrator.errors import InputError

BATCH_BYTES = 2**20
"""Text that is encoded at once; its encoding takes some fifty times the memory."""


def shard_name(number: int) -> str:
    """The file of shard `number` within the prepared data."""
    return f"shards/{number:06d}.bin"


def record_name(number: int) -> str:
    """The file of its record."""
    return f"records/{number:06d}.json"


def dtype(vocabulary: int) -> str:
    """The smallest little-endian unsigned type that holds all ids: '<u2' or '<u4'."""
    return "<u2" if vocabulary <= 2**16 else "<u4"


def write_shard(uri: str, number: int, part: Part, vocabulary: int, roles: Mapping[str, int]) -> None:
    """Write shard `number` of the prepared data at `uri`, and then its record.

    The record holds tokens, documents, bytes of text, the checksum and how often each id occurs.
    Raises InputError for text that cannot be read as such.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU, and others run beside it
    folder = Folder(uri)
    encoder = tokenizers.encoder((folder.read("tokenizer.json") or b"").decode())
    found: list[np.ndarray] = []
    text_bytes = 0
    for batch in _batches(piece for span in part for piece in pieces(span)):
        text_bytes += sum(piece.bytes for piece in batch)
        encoded = encoder.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encoded, strict=True):
            closing = [roles["eos"]] * piece.ends + [roles["sep"]] * piece.halves
            found.append(np.array(encoding.ids + closing, dtype=dtype(vocabulary)))
    tokens = np.concatenate(found) if found else np.zeros(0, dtype(vocabulary))
    data = tokens.tobytes()
    folder.write(shard_name(number), data)
    record = {
        "tokens": len(tokens),
        "documents": int((tokens == roles["eos"]).sum()),
        "bytes": text_bytes,
        "xxh3": xxhash.xxh3_128_hexdigest(data),
        "counts": np.bincount(tokens, minlength=vocabulary).tolist(),
    }
    folder.write_json(record_name(number), record)


def gather(
    folder: Folder,
    fingerprint: str,
    uris: Sequence[str],
    parts: Sequence[Part],
    vocabulary: int,
    roles: dict[str, int],
) -> Manifest:
    """The manifest of all shards in `folder`, from their records. `uris` are the sources' addresses.

    Raises InputError if there is no text in the sources.
    """
    prepared: list[list[Shard]] = [[] for _ in uris]
    counts = np.zeros(vocabulary, dtype=np.int64)
    with ThreadPoolExecutor(16) as pool:  # a store answers a read in tens of milliseconds
        records = pool.map(lambda number: folder.read_json(record_name(number)), range(len(parts)))
    for number, (part, record) in enumerate(zip(parts, records, strict=True)):
        counts += np.array(record.pop("counts"), dtype=np.int64)
        if record["tokens"]:
            prepared[part[0].file.source].append(Shard(file=shard_name(number), **record))
    every = [shard for source in prepared for shard in source]
    tokens, text = sum(s.tokens for s in every), sum(s.bytes for s in every)
    if not text:
        raise InputError("there is no text in the files", "data.sources", "give files with text")
    share = counts[counts > 0] / tokens
    encoder = tokenizers.encoder((folder.read("tokenizer.json") or b"").decode())
    return Manifest(
        fingerprint=fingerprint,
        dtype=dtype(vocabulary),
        tokenizer="tokenizer.json",
        vocabulary=vocabulary,
        roles=roles,
        sentinels=tuple(tokenizers.sentinels(encoder)),
        sources=tuple(PreparedSource(uri, tuple(found)) for uri, found in zip(uris, prepared, strict=True)),
        tokens=tokens,
        documents=sum(s.documents for s in every),
        bytes=text,
        entropy=float(-(share * np.log(share)).sum()),
        bytes_per_token=text / tokens,
    )


def sample(parts: Sequence[Part], limit: int) -> Iterator[str]:
    """About `limit` bytes of text: the beginning of each part, as much as is its due."""
    share = limit / max(1, sum(span.bytes for part in parts for span in part))
    for part in parts:
        held, due = 0, share * sum(span.bytes for span in part)
        for piece in (piece for span in part for piece in pieces(span)):
            yield piece.text
            held += piece.bytes
            if held >= due:
                break


def _batches(items: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.bytes + 1  # an empty piece takes memory too
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

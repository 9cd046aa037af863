"""Reuse of shards: copy those of other prepared data in the same cache that hold the same text by the same tokenizer.

    <cache>/<fingerprint>/parts.json    the keys of its parts, in order
    <cache>/tokens/<key>.json           the names of all prepared data of that tokenizer, format and cleaning

New or changed source files then cost no more than themselves, if the division into parts stays the same (see
`sources.part_size`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import xxhash

from orchestrator.data.prepare.shards import (
    TokenFormat,
    contents_name,
    ends_name,
    read_record,
    record_name,
    refuted_engine,
    shard_name,
)
from orchestrator.data.store.data_folder import DataFolder

PARTS = "parts.json"


def tokens_key(tokenizer: str, written: TokenFormat, clean: str) -> str:
    """Return the key of everything besides the text that determines a part's tokens."""
    kind = written.kind.to_json(written.version) if written.kind else None
    key_parts = [tokenizer, written.vocabulary, dict(written.roles), written.version, kind, clean]
    framing = [written.framing.to_json()] if written.framing.to_json() else []
    key_parts += framing
    return xxhash.xxh3_128_hexdigest(json.dumps(key_parts, sort_keys=True).encode())


def existing_parts(folder: DataFolder, key: str, parts: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Return the parts that other data in the cache already has: for each part number, that data's URI and its shard
    number.
    """
    cache, own_name = _cache_of(folder)
    location: dict[str, tuple[str, int]] = {}
    for name in _names(cache, key):
        uri = f"{cache.uri}/{name}"
        if name != own_name and (listed := DataFolder(uri).read_json(PARTS)):
            location |= {part: (uri, number) for number, part in enumerate(listed)}
    return {number: location[part] for number, part in enumerate(parts) if part in location}


def note(folder: DataFolder, key: str, parts: Sequence[str]) -> None:
    """Register prepared data, so that others find its parts."""
    cache, own_name = _cache_of(folder)
    if folder.read_json(PARTS) != list(parts):
        folder.write_json(PARTS, list(parts))
    if own_name not in (names := _names(cache, key)):
        cache.write_json(_file(key), [*names, own_name])


def copy_shard(source: str, number: int, folder: DataFolder, to: int, data_format: int) -> bool:
    """Copy shard `number` of the data at `source` to shard `to`, with its record.

    Returns False if the shard differs from what was written, or if an engine made it that turned out to be wrong.
    """
    other = DataFolder(source)
    record = read_record(other, number, data_format)
    engine = str(((record or {}).get("engine") or {}).get("name", ""))
    if record is None or (engine and engine in (refuted_engine(other), refuted_engine(folder))):
        return False
    files: list[tuple[str, bytes]] = []
    for name, expected, checksum in (
        (shard_name, record["xxh3"], xxhash.xxh3_128_hexdigest),
        (lambda n: ends_name(shard_name(n)), record.get("ends", ""), xxhash.xxh3_64_hexdigest),
        (lambda n: contents_name(shard_name(n)), record.get("contents", ""), xxhash.xxh3_64_hexdigest),
    ):
        data = other.read(name(number)) if expected else b""
        if expected and (data is None or checksum(data) != expected):
            return False
        if expected:
            files.append((name(to), data or b""))
    for path, data in files:
        folder.write(path, data)
    folder.write(record_name(to), other.read(record_name(number)) or b"")
    return True


def _cache_of(folder: DataFolder) -> tuple[DataFolder, str]:
    cache, name = folder.uri.rsplit("/", 1)
    return DataFolder(cache), name


def _file(key: str) -> str:
    return f"tokens/{key}.json"


def _names(cache: DataFolder, key: str) -> list[str]:
    try:
        return [str(name) for name in cache.read_json(_file(key)) or []]
    except ValueError:
        return []

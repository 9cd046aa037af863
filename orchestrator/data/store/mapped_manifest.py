"""The manifest of large data, which the first process of a node parses, and all others map.

    <prepared data>/list/<checksum of manifest.json>/000000.json     checksums; written last
    <prepared data>/list/<checksum of manifest.json>/000000.head     the manifest without its shards
    <prepared data>/list/<checksum of manifest.json>/000000.rows     the shards, see `MappedShards`

The manifest of 10^12 tokens has 125,000 shards and 90 MB. Where the data's folder is remote, or may not be written, the
files are in the node's folder of copies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.derived_arrays import Keep, arrays_on_disk
from orchestrator.data.store.manifest import DataManifest, MappedShards, PreparedSource
from orchestrator.data.store.node_copies import AGAIN, derived_folder
from orchestrator.data.store.verified_shard import DataGone
from orchestrator.storage.own_folder import own_folder_or_another

LARGE = 2**20
"""Bytes of a manifest from which on it is mapped. A smaller one is parsed in milliseconds."""
END = re.compile(rb'"checksum": "([0-9a-f]{32})"}\n')
"""How a manifest ends. Its checksum covers everything before."""
END_BYTES = 48
NAMES = ("head", "rows", "ends", "lengths", "parts")


def read_mapped(folder: DataFolder) -> DataManifest | None:
    """Like `manifest.read`, but the shards of large data are mapped from files, which the first process makes.

    Also raises DataGone if the manifest is replaced meanwhile.
    """
    checksum = _checksum_of_large(folder)
    if checksum is None:
        return manifest.read(folder)
    place = (derived_folder(folder) or own_folder_or_another("tokens")) / "list" / checksum
    try:
        arrays, _ = arrays_on_disk(place, 0, NAMES, lambda keep: _fill(folder, checksum, keep))
    except OSError:  # such as a full disk: only memory and time are lost
        return manifest.read(folder)
    head = json.loads(arrays["head"].tobytes().rstrip(b"\0"))
    result = DataManifest.from_json(head["manifest"])
    sources = []
    first = 0
    for source, shards in zip(result.sources, head["shards"], strict=True):
        mapped = MappedShards(
            arrays["rows"].view(np.uint8),
            arrays["ends"][first : first + shards + 1],
            arrays["lengths"][first : first + shards],
            arrays["parts"][first : first + shards],
        )
        sources.append(PreparedSource(source.uri, mapped))
        first += shards
    result = replace(result, sources=tuple(sources))
    result.__dict__["digest"] = head["digest"]  # the cached property, whose computation reads all shards
    return result


def _checksum_of_large(folder: DataFolder) -> str | None:
    """Return the checksum that a large manifest ends with; None if it is missing, small, or ends otherwise."""
    size = folder.size(manifest.NAME)
    if size is None or size < LARGE:
        return None
    end = bytearray(END_BYTES)
    folder.read_into(manifest.NAME, size - END_BYTES, memoryview(end))
    match = END.fullmatch(end)
    return match[1].decode() if match else None


def _fill(folder: DataFolder, checksum: str, keep: Keep) -> dict[str, Any]:
    """Pass the arrays of the manifest with this checksum to `keep`; there are no further facts."""
    document = manifest.read_document(folder)
    if document is None or document[0].pop("checksum", None) != checksum:
        raise DataGone(f"{manifest.NAME} was replaced while it was read", folder.uri, AGAIN)
    data, parsed = document
    shards = [shard for source in data["sources"] for shard in source["shards"]]
    keep("ends", _kept_rows(shards, keep))
    for source in parsed.sources:
        keep("lengths", source.lengths)
        keep("parts", source.parts)
    data["sources"] = [{"uri": source.uri, "shards": []} for source in parsed.sources]
    shards_of_sources = [len(source.shards) for source in parsed.sources]
    head = {"manifest": data, "shards": shards_of_sources, "digest": parsed.digest}
    keep("head", _whole_numbers(json.dumps(head).encode()))
    return {}


def _whole_numbers(text: bytes) -> np.ndarray:
    """Return a text as int64, which is what an array on disk has; zeros follow it."""
    return np.frombuffer(text + bytes(-len(text) % 8), "<i8")


def _kept_rows(shards: Sequence[dict[str, Any]], keep: Keep) -> np.ndarray:
    """Pass the JSON of the shards to `keep`; return `MappedShards.ends`."""
    rows = [json.dumps(shard).encode() for shard in shards]
    keep("rows", _whole_numbers(b"".join(rows)))
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)

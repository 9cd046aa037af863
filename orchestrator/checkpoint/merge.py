"""Merging the records of all writers into the manifest of one commit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from orchestrator.checkpoint.manifest import Chunk, CommitManifest, FileEntry, TensorEntry, check_manifest
from orchestrator.config.errors import InputError


def merge_records(
    step: int, records: list[dict[str, Any]], meta: dict[str, Any], where: str
) -> CommitManifest:
    """The manifest of a commit, checked, from the writers' records (see `shard.file_content`).

    Raises:
        InputError: chunks overlap or leave holes, writers disagree, or `meta` lacks something.
    """
    rest = dict(meta)
    try:
        position, receipt = int(rest.pop("position")), str(rest.pop("receipt"))
        rest = json.loads(json.dumps(rest))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"meta is not usable: {error!r}", where, "pass JSON with position and receipt"
        ) from None
    files = {
        record["file"]: FileEntry(record["bytes"], record["header_bytes"], record["header"])
        for record in records
    }
    sizes = {record["block_bytes"] for record in records}
    if len(sizes) > 1:
        raise InputError(f"writers used blocks of {sorted(sizes)} bytes", where, "open all stores alike")
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    block_bytes = sizes.pop() if sizes else 1 << 20
    commit = CommitManifest(
        step, position, receipt, created, rest, block_bytes, files, _tensors(records, where)
    )
    check_manifest(commit, where)
    return commit


def _tensors(records: list[dict[str, Any]], where: str) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for record in records:
        for one in record["chunks"]:
            name, kind = one["name"], (tuple(one["shape"]), one["dtype"])
            if kinds.setdefault(name, kind) != kind:
                raise InputError(
                    f"{name}: writers disagree: {kinds[name]} and {kind}", where, "save it alike"
                )
            start, extent = tuple(one["start"]), tuple(one["extent"])
            chunk = Chunk(record["file"], one["offset"], start, extent, tuple(one["blocks"]))
            chunks.setdefault(name, []).append(chunk)
    return {name: TensorEntry(*kinds[name], tuple(chunks[name])) for name in sorted(chunks)}

"""Collect the records of shards into the manifest of prepared data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer as tokenizers
from orchestrator.data.encoding.engines import add_engine
from orchestrator.data.prepare import named_tokens, rejections
from orchestrator.data.prepare.shards import TokenFormat, read_record, record_name, shard_name
from orchestrator.data.sources import Part
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, PreparedSource, TokenShard
from orchestrator.storage.read_at_once import AT_ONCE, read_at_once


def gather(
    folder: DataFolder,
    fingerprint: str,
    uris: Sequence[str],
    parts: Sequence[Part],
    written: TokenFormat,
    where: str = "data.sources",
) -> DataManifest:
    """Build the manifest of all shards in `folder` from their records, and write rejected.jsonl next to it.

    Args:
        folder: the prepared data.
        fingerprint: its fingerprint.
        uris: the URIs of the sources.
        parts: the parts of the text.
        written: the token format.
        where: the key of the sources in the job file.

    Raises InputError if a record is damaged or the sources have no text.
    """
    built, findings = gather_some(
        folder, fingerprint, uris=uris, parts=parts, numbers=range(len(parts)), written=written
    )
    rejected = rejections.write(folder, findings)
    if not built.bytes:
        hint = "; ".join(["give files with text", *rejections.notes(rejected, folder.uri)])
        raise InputError("there is no text in the files", where, hint)
    return replace(built, rejected=rejected)


def gather_some(
    folder: DataFolder,
    fingerprint: str,
    uris: Sequence[str],
    parts: Sequence[Part],
    numbers: Sequence[int],
    written: TokenFormat,
) -> tuple[DataManifest, list[rejections.Finding]]:
    """Like `gather`, for the shards of these ascending `numbers` alone. Also returns the findings about rejected text
    in them.

    Raises InputError if a record is damaged.
    """
    prepared: list[list[TokenShard]] = [[] for _ in uris]
    engines: dict[str, dict[str, int]] = {}
    counts = np.zeros(written.vocabulary, dtype=np.int64)
    findings: list[rejections.Finding] = []
    named: list[named_tokens.Counts] = []
    for number, record in zip(numbers, _records(folder, numbers, written.version), strict=True):
        if record is None:
            raise InputError(f"{record_name(number)} is damaged", folder.uri, "run the same command again")
        counts += record.pop("counts")
        add_engine(engines, record.pop("engine"))
        findings += record.pop("rejected")
        named.append(record.pop("named"))
        if record["tokens"] or (
            written.version > 2 and record["bytes"]
        ):  # a part may have text that gives no token
            prepared[parts[number][0].file.source].append(TokenShard(file=shard_name(number), **record))
    every = [shard for source in prepared for shard in source]
    tokens = sum(s.tokens for s in every)
    text = sum(s.bytes for s in every)
    documents = sum(s.documents for s in every)
    before = () if written.kind else written.framing.before
    counts -= documents * np.bincount(before, minlength=len(counts)) if before else 0
    predicted = tokens - documents * len(before)
    ends = max(int(counts[written.roles["eos"]]) - documents, 0)
    share = counts[counts > 0] / max(predicted, 1)
    tokenizer = folder.read("tokenizer.json") or b""
    built = DataManifest(
        fingerprint=fingerprint,
        dtype=written.dtype,
        records=written.kind.objective if written.kind else "",
        chat=_chat_of(written),
        tokenizer="tokenizer.json",
        vocabulary=written.vocabulary,
        roles=dict(written.roles),
        sentinels=tokenizers.sentinels_in(tokenizer.decode()),
        sources=tuple(PreparedSource(uri, tuple(built)) for uri, built in zip(uris, prepared, strict=True)),
        tokens=tokens,
        documents=documents,
        bytes=text,
        entropy=float(-(share * np.log(share)).sum()),
        bytes_per_token=text / max(predicted, 1),
        format=written.version,
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(tokenizer),
        engines=engines,
        frame=(written.framing.before, written.framing.after),
        named=named_tokens.summed(named),
        inner_ends=ends if written.version > 5 and not written.kind else 0,
    )
    return built, findings


def _chat_of(written: TokenFormat) -> dict[str, Any]:
    kind = written.kind
    if kind is None or not kind.template:
        return {}
    tools = {"tool_template": kind.tool_template} if "tool_template" in kind.to_json(written.version) else {}
    return {"template": kind.template, "tokens": dict(kind.tokens), **tools}


def _records(folder: DataFolder, numbers: Sequence[int], data_format: int) -> Iterator[dict[str, Any] | None]:
    """Yield the records of these shards in order, a few at a time: each counts every token of the vocabulary."""
    return read_at_once(lambda number: read_record(folder, number, data_format), numbers, held=AT_ONCE)

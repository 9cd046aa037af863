"""Statistics of prepared data for its report: lengths, duplicates, languages and fertility, by source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.data.clean.document_rules import identifier
from orchestrator.data.clean.totals import read_totals
from orchestrator.data.clean.words import words
from orchestrator.data.prepare import rejections
from orchestrator.data.prepare.contents import digests
from orchestrator.data.store.tokens import Tokens

SAMPLE = 300
"""Number of documents of each source that are decoded, evenly spaced."""
SAMPLE_TOKENS = 2048
"""Maximum tokens that are decoded of a sampled document."""
COUNTED = 2**22
"""Approximate number of documents compared for duplicates; from more data a part is chosen by its text."""
BINS = 24
"""Bins of the lengths: [1, 2), [2, 4), ... tokens."""


def census(uri: str) -> dict[str, Any]:
    """Return the statistics of the data at `uri`. Raises InputError and DamagedShard as `Tokens` does."""
    tokens = Tokens.open(uri)
    manifest = tokens.manifest
    duplicates = _duplicates(tokens)
    sources = []
    for number, source in enumerate(manifest.sources):
        lengths, total = _lengths(tokens, number)
        sources.append(
            {
                "uri": source.uri,
                "documents": sum(shard.documents for shard in source.shards),
                "tokens": source.tokens,
                "bytes": sum(shard.bytes for shard in source.shards),
                "lengths": lengths,
                "longest": total,
                "duplicates": duplicates[number] if duplicates else None,
                **({} if manifest.records else _sampled(tokens, number)),
            }
        )
    return {
        "uri": tokens.folder.uri,
        "fingerprint": manifest.fingerprint,
        "records": manifest.records,
        "vocabulary": manifest.vocabulary,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "sources": sources,
        "rejected": rejections.read(tokens.folder),
        "clean": with_tokens(read_totals(tokens.folder), tokens),
    }


def with_tokens(steps: list[dict[str, Any]], tokens: Tokens) -> list[dict[str, Any]]:
    """Return the totals of cleaning with the approximate number of tokens that each step removed from each source.

    Removed text is never tokenised, so tokens are estimated from its bytes, at the bytes per token of the kept text.
    """
    ratios = []
    for source in tokens.manifest.sources:
        text = sum(shard.bytes for shard in source.shards)
        ratios.append(source.tokens / text if text else 1 / tokens.manifest.bytes_per_token)
    return [
        {
            **step,
            "sources": [
                {**counts, "removed_tokens": round((counts["bytes"] - counts["bytes_after"]) * ratio)}
                for counts, ratio in zip(step["sources"], ratios, strict=True)
            ],
        }
        for step in steps
    ]


def _lengths(tokens: Tokens, source: int) -> tuple[list[int], int]:
    """Return how many documents have [2^n, 2^(n+1)) tokens, by n, and the tokens of the longest."""
    counts = np.zeros(BINS, np.int64)
    longest = 0
    last = 0
    for ends in tokens.document_ends_by_part(source):
        if len(ends):
            lengths = np.maximum(1, np.diff(ends, prepend=last))
            # Bin n counts lengths in [2^n, 2^(n+1)); the last bin also counts longer ones.
            counts += np.bincount(np.minimum(np.log2(lengths).astype(np.int64), BINS - 1), minlength=BINS)
            longest = max(longest, int(lengths.max()))
            last = int(ends[-1])
    return counts.tolist(), longest


def _duplicates(tokens: Tokens) -> list[int] | None:
    """Return the approximate number of each source's documents that repeat an earlier text; None for data without
    contents.
    """
    if tokens.manifest.format < 3:
        return None
    # Equal texts have equal hashes. Hashes are uniform, so keeping those below a limit samples texts with all copies.
    share = min(1.0, COUNTED / max(1, tokens.manifest.documents))
    limit = math.ceil(share * 2**64)
    hashes = [digests(tokens.contents(source)) for source in range(tokens.sources)]
    hashes = [values[values < limit] if share < 1 else values for values in hashes]
    every = np.concatenate([np.zeros(0, np.uint64), *hashes])
    first = np.zeros(len(every), bool)
    first[np.unique(every, return_index=True)[1]] = True
    ends = np.cumsum([0, *map(len, hashes)])
    repeated = [
        round(int(np.count_nonzero(~first[begin:end])) / share) for begin, end in pairwise(ends.tolist())
    ]
    # further records of a row repeat its text
    more = [sum(shard.turns.get("more", 0) for shard in source.shards) for source in tokens.manifest.sources]
    return [max(0, count - distinct) for count, distinct in zip(repeated, more, strict=True)]


def _sampled(tokens: Tokens, source: int) -> dict[str, Any]:
    """Return languages and tokens per word of a sample of a source's documents."""
    languages: Counter[str] = Counter()
    number = total = 0
    language = _language()
    for text, length in _sample(tokens, source):
        number += sum(any(map(str.isalnum, word)) for word in words(text))
        total += length
        if language and text.strip():
            languages[language(text)] += 1
    return {
        "languages": dict(languages.most_common()),
        "fertility": total / number if number else None,
        "sampled": min(SAMPLE, sum(shard.documents for shard in tokens.manifest.sources[source].shards)),
    }


def _sample(tokens: Tokens, source: int) -> Iterator[tuple[str, int]]:
    """Yield evenly spaced documents with their tokens, without the closing one."""
    ends = tokens.document_ends(source)
    decoder = tokens.tokenizer()
    for number in (
        np.unique(np.linspace(0, len(ends) - 1, min(SAMPLE, len(ends))).astype(np.int64)) if len(ends) else ()
    ):
        begin = int(ends[number - 1]) if number else 0
        length = min(int(ends[number]) - begin - 1, SAMPLE_TOKENS)
        ids = tokens.window(source, begin, length).tolist()
        yield decoder.decode(ids, skip_special_tokens=False), length


def _language() -> Callable[[str], str] | None:
    """Return a function that detects the language of a text; None without the extra `data`."""
    try:
        model = identifier()
    except InputError:
        return None
    return lambda text: str(model.classify(text[:2000])[0])

"""The identity of a file's and a part's text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import xxhash

from orchestrator.data.sources.files import Part, SourceFile


def identity_of(file: SourceFile) -> dict[str, Any]:
    """Return everything that determines a file's text, and which of several files with that text it is."""
    keys = ("kind", "size", "content", "field", "compression", "on_error")
    more = {key: value for key in ("folders", "labels", "copy") if (value := getattr(file, key))}
    return {key: getattr(file, key) for key in keys} | more


def numbered(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the files, each with the number of earlier files with the same text, so that copies are decided on
    separately.
    """
    copies: Counter[str] = Counter()
    result = []
    for file in files:
        text = json.dumps(identity_of(file), sort_keys=True)
        result.append(replace(file, copy=copies[text]) if copies[text] else file)
        copies[text] += 1
    return result


def part_key(part: Part) -> str:
    """Return a key of a part's text. Equal keys mean equal text, in any corpus, and the parts of a corpus have
    different keys.
    """
    spans = [[identity_of(span.file), span.start, span.stop] for span in part]
    return xxhash.xxh3_128_hexdigest(json.dumps(spans, sort_keys=True).encode())

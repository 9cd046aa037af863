"""What identifies the text of a file, and of a part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import xxhash

from orchestrator.data.sources.files import Part, SourceFile


def identity_of(file: SourceFile) -> dict[str, Any]:
    """What of a file determines its text, and which of several files with that text it is."""
    keys = ("kind", "size", "content", "field", "compression", "on_error")
    folders = {"folders": file.folders} if file.folders else {}
    return {key: getattr(file, key) for key in keys} | ({"copy": file.copy} if file.copy else {}) | folders


def numbered(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files, each with how many before it have its text: what is decided of one copy is not decided of another."""
    seen: Counter[str] = Counter()
    found = []
    for file in files:
        text = json.dumps(identity_of(file), sort_keys=True)
        found.append(replace(file, copy=seen[text]) if seen[text] else file)
        seen[text] += 1
    return found


def part_key(part: Part) -> str:
    """What identifies the text of a part: equal keys mean equal text, in whatever corpus, and no two parts of a corpus
    have the same."""
    spans = [[identity_of(span.file), span.start, span.stop] for span in part]
    return xxhash.xxh3_128_hexdigest(json.dumps(spans, sort_keys=True).encode())

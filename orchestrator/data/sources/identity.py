"""What identifies the text of a file, and of a part."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from orchestrator.data.sources.files import Part, SourceFile


def identity_of(file: SourceFile) -> dict[str, Any]:
    """What of a file determines its text."""
    return {
        key: getattr(file, key) for key in ("kind", "size", "content", "field", "compression", "on_error")
    }


def part_key(part: Part) -> str:
    """What identifies the text of a part: equal keys mean equal text, in whatever corpus."""
    spans = [[identity_of(span.file), span.start, span.stop] for span in part]
    return xxhash.xxh3_128_hexdigest(json.dumps(spans, sort_keys=True).encode())

from __future__ import annotations

import re
from typing import Any

from orchestrator.observe.pages.data_report import page

COUNTS = {
    "documents": 10,
    "bytes": 1000,
    "removed": 4,
    "removed_bytes": 300,
    "changed": 1,
    "bytes_after": 700,
}


def source(uri: str, **more: Any) -> dict[str, Any]:
    return {
        "uri": uri, "documents": 6, "tokens": 200, "bytes": 700, "lengths": [0, 0, 1, 0, 5, *[0] * 19], "longest": 31,
        "duplicates": 1, "languages": {"en": 5, "de": 1}, "fertility": 1.5, "sampled": 6, **more,
    }  # fmt: skip


def census(**more: Any) -> dict[str, Any]:
    step = {
        "step": "gopher_quality", "options": {}, "sources": [{**COUNTS, "removed_tokens": 85}] * 2,
        "reasons": {"too few words": 8}, "samples": [{"reason": "too few words", "text": "<script>alert(1)</script>"}],
    }  # fmt: skip
    return {
        "uri": "/data/0123", "fingerprint": "0123456789", "records": "", "vocabulary": 512, "documents": 12,
        "tokens": 400, "bytes": 1400, "sources": [source("a & b.txt"), source("c.jsonl")], "clean": [step],
        "rejected": [{"source": 0, "file": "a", "kind": "utf-8", "action": "left out", "count": 3, "examples": []}],
        **more,
    }  # fmt: skip


def test_the_page_has_everything_and_nothing_from_outside() -> None:
    said = page(census())
    for wanted in ("a &amp; b.txt", "gopher_quality", "too few words", "utf-8", "83.3%", "1.50", "40.0%"):
        assert wanted in said, wanted
    assert "&lt;script&gt;alert(1)" in said
    assert "<script" not in said
    assert not re.search(r"""(?:src|href)\s*=|url\(""", said)


def test_the_page_of_records_and_of_old_data_says_what_is_not_known() -> None:
    bare = dict.fromkeys(("duplicates",))
    plain = source("a.txt", **bare)
    for key in ("languages", "fertility", "sampled"):
        del plain[key]
    said = page(census(records="dpo", sources=[plain], clean=[], rejected=[]))
    assert "records are not text" in said
    assert "Cleaning" not in said
    assert "unknown" in said

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from orchestrator.data.samples.held_out_split import split
from orchestrator.data.store.summary import inspect, sizes
from orchestrator.data.store.tokens import Tokens


def test_a_summary_adds_up_and_shows_the_text(prepare_here: Callable[..., str]) -> None:
    uri = prepare_here(["Once upon a time. " * 40], ["The end.\n<|endoftext|>\nReally."])
    found = inspect(uri)
    assert json.loads(json.dumps(found)) == found
    assert (
        found["tokens"]
        == sum(source["tokens"] for source in found["sources"])
        == Tokens.open(uri).manifest.tokens
    )
    assert [source["documents"] for source in found["sources"]] == [1, 2]
    assert found["sources"][0]["excerpt"].startswith("Once upon a time.")
    assert found["sources"][1]["excerpt"] == "The end.<|endoftext|>Really.<|endoftext|>"
    nats_per_byte = found["entropy_nats"] * found["tokens"] / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(nats_per_byte / math.log(2))


def test_a_summary_tells_what_a_share_would_hold_out(prepare_here: Callable[..., str]) -> None:
    uri = prepare_here(["\n<|endoftext|>\n".join(f"document {number}" for number in range(100))])
    found = inspect(uri, 0.3)["held_out"]
    parts = split(Tokens.open(uri), 0.3)
    assert found == {
        "documents": parts.held_out.documents,
        "tokens": parts.held_out.length(0),
        "bytes": parts.bytes,
    }
    assert 10 < found["documents"] < 50
    assert "held_out" not in inspect(uri)
    assert sizes(uri) == {key: inspect(uri)[key] for key in ("documents", "tokens", "bytes")}

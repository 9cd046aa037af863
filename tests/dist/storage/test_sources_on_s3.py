"""Raw files on an object store that fails now and then: what it does not give is asked for again, never left out."""

from __future__ import annotations

import gzip
import json

import fsspec
from s3 import Proxy

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources.documents import pieces
from orchestrator.data.sources.rejected import Rejected


def test_a_store_that_fails_costs_no_document(bucket: str, proxy: Proxy) -> None:
    lines = [json.dumps({"text": f"document {n}"}) for n in range(200)]
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    fs.pipe_file(f"{bucket}/a/1.jsonl.gz", gzip.compress("\n".join(lines[:100]).encode()))
    fs.pipe_file(f"{bucket}/a/b/2.jsonl", "\n".join(lines[100:]).encode())
    fs.pipe_file(f"{bucket}/all.list", f"a/1.jsonl.gz\n{bucket}/a/b/2.jsonl\n".encode())
    count = 0

    def spoil(line: str) -> str:
        nonlocal count
        count += 1
        return "cut" if count % 3 == 0 and line.startswith("GET ") else ""

    proxy.spoil = spoil
    for uri in (f"{bucket}/a", f"{bucket}/all.list"):
        rejected = Rejected()
        files = sources.resolve([Source(uri=uri)], on_error="skip")
        (part,) = sources.cut(files, 10**9)
        found = [piece.text for span in part for piece in pieces(span, rejected=rejected)]
        assert sorted(found) == sorted(json.loads(line)["text"] for line in lines)
        assert rejected.to_json() == []
    assert proxy.spoiled

"""Data that an earlier version has prepared stays what it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder

FORMAT_2 = """{"fingerprint": "ffffffffffffffffffffffffffffffff", "dtype": "<u2", "tokenizer": "tokenizer.json",
"vocabulary": 320, "roles": {"eos": 0, "pad": 1, "bos": 2, "cls": 3, "sep": 4, "mask": 5, "unk": 6}, "sentinels": [],
"sources": [{"uri": "a.txt", "shards": [{"file": "shards/000000.bin", "tokens": 12, "documents": 2, "bytes": 19,
"xxh3": "dd6e77843b2c2eac36dacd63ffb239b3", "blocks": "1fe8f4d6c22aa93f", "ends": "fdde772f0bfa95ed"}]}], "tokens": 12,
"documents": 2, "bytes": 19, "entropy": 2.253857589601352, "bytes_per_token": 1.5833333333333333, "format": 2,
"tokenizer_xxh3": "d06ee2fa3c222fafbb3c81ae33c48323", "checksum": "43c37df4b22df7ee155478e4b19d7c44"}"""
"""As the version before wrote it."""


def test_data_of_format_2_is_read_and_made_again_as_it_was(tmp_path: Path) -> None:
    folder = DataFolder(str(tmp_path / "prepared"))
    folder.write("manifest.json", FORMAT_2.encode())
    found = manifest.read(folder)
    assert found is not None
    assert {**found.to_json(), "checksum": found.checksum()} == {
        **json.loads(FORMAT_2),
        "sentinels": (),
        "sources": found.to_json()["sources"],
    }
    (tmp_path / "a.txt").write_text("a few words\n<|endoftext|>\nand more")
    (part,) = sources.cut(sources.resolve([Source(uri=str(tmp_path / "a.txt"))]), 10**6)
    text = train_bytes(["a few words"], 320, ())
    roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
    folder.write("tokenizer.json", text.encode())
    shards.make_shard(folder.uri, 0, part, shards.TokenFormat(320, roles, 2))()
    assert shards.is_complete(folder)
    assert shards.unfinished(folder, 1, shards.TokenFormat(320, roles, 2)) == []
    assert shards.unfinished(folder, 1, shards.TokenFormat(320, roles, 3)) == [0]
    made = gather(folder, "f" * 32, ["a.txt"], [part], shards.TokenFormat(320, roles, 2))
    assert made.engines
    assert replace(made, engines={}) == found
    assert not (tmp_path / "prepared" / "shards" / "000000.contents").exists()


def test_a_manifest_has_no_credentials_of_where_the_text_was(tmp_path: Path) -> None:
    folder = DataFolder(str(tmp_path))
    folder.write("manifest.json", FORMAT_2.encode())
    found = manifest.read(folder)
    assert found is not None
    named = "http://ann:secret@host/a.txt, https://host/b.txt?sig=secret, /data/a, b?c"
    manifest.write(folder, replace(found, sources=(replace(found.sources[0], uri=named),)))
    written = manifest.read(folder)
    assert written is not None
    assert written.sources[0].uri == "http://host/a.txt, https://host/b.txt, /data/a, b?c"

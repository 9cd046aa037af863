"""Records of shards are collected with few of them in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from orchestrator.data.prepare import gather
from orchestrator.data.prepare.shards import TokenFormat
from orchestrator.data.store.data_folder import DataFolder


def test_memory_does_not_grow_with_the_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts every token of the vocabulary: all of a large corpus would take gigabytes."""
    vocabulary, shards = 50_000, 150

    def record(folder: DataFolder, number: int, data_format: int) -> dict[str, Any]:
        counts = np.zeros(vocabulary, np.int64)
        counts[number] = 2
        return {
            "tokens": 2, "documents": 1, "bytes": 9, "xxh3": "", "blocks": "", "ends": "", "contents": "",
            "counts": counts, "engine": None, "rejected": [], "named": {},
        }  # fmt: skip

    monkeypatch.setattr(gather, "read_record", record)
    folder = DataFolder(str(tmp_path))
    folder.write("tokenizer.json", Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode())
    part: Any = (SimpleNamespace(file=SimpleNamespace(source=0)),)
    tracemalloc.start()
    try:
        found, _ = gather.gather_some(
            folder, "f" * 32, ["a"], [part] * shards, range(shards), TokenFormat(vocabulary, {"eos": 0})
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.tokens, found.documents, len(found.shards)) == (2 * shards, shards, shards)
    assert found.entropy == pytest.approx(np.log(shards))
    assert peak < 8 * vocabulary * shards / 2

"""Prepared data without Ray: the same shards that `prepare` writes, made in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.part_text import sample
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder

ENTRIES = 320


@pytest.fixture
def prepare_here(tmp_path: Path) -> Callable[..., str]:
    """Turns texts, one list a source and one file an item, into prepared data; returns its URI."""

    def prepare(
        *texts: list[str], part_bytes: int = 400, uri: str = "", special: tuple[str, ...] = ()
    ) -> str:
        named = []
        for number, files in enumerate(texts):
            for index, text in enumerate(files):
                path = tmp_path / f"source-{number}" / f"{index:03d}.txt"
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, newline="")
            named.append(Source(uri=str(tmp_path / f"source-{number}" / "*.txt")))
        parts = sources.cut(sources.resolve(named), part_bytes)
        folder = DataFolder(uri or str(tmp_path / "prepared"))
        text = train_bytes(sample(parts, 2**20), ENTRIES, special)
        roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
        folder.write("tokenizer.json", text.encode())
        for number, part in enumerate(parts):
            shards.make_shard(folder.uri, number, part, shards.TokenFormat(ENTRIES, roles))()
        found = gather(folder, "f" * 32, [s.uri for s in named], parts, shards.TokenFormat(ENTRIES, roles))
        manifest.write(folder, found)
        return folder.uri

    return prepare

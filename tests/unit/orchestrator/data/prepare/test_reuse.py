"""Prepared data takes over what other data in the cache has of the same text, and is what it would be without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import part_tasks, reuse, shards
from orchestrator.data.prepare.prepare import prepare as prepare_data

TOKENIZER = train_bytes(["a few words of text, and more of them.\n"], 320, ())


def content(uri: str) -> dict[str, bytes]:
    found = Path(uri)
    return {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}


def test_only_what_is_new_is_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = shards.make_shard

    def counted(uri: str, number: int, *arguments: Any, **keywords: Any) -> Any:
        made.append(number)
        return make(uri, number, *arguments, **keywords)

    def run(task: Any, rows: list[dict[str, Any]], cache: str, *_: Any, **__: Any) -> Iterator[int]:
        for done, row in enumerate(rows, 1):
            part_tasks.raise_error(part_tasks.run_task(task, cache, row))
            yield done

    monkeypatch.setattr(part_tasks, "run_tasks", run)
    monkeypatch.setattr(shards, "make_shard", counted)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    for name in "bcd":
        (tmp_path / f"{name}.txt").write_text(f"a file of words {name}\n<|endoftext|>\n" * 40)

    def prepared(cache: str) -> str:
        data = DataSpec(
            sources=[{"uri": str(tmp_path / "*.txt")}],
            tokenizer=str(tmp_path / "tokenizer.json"),
            sequence_length=8,
        )
        return prepare_data(data, (), str(tmp_path / cache), part_bytes=500)

    first = prepared("cache")
    every = len(made)
    assert every > 6
    (tmp_path / "a.txt").write_text("a new one, before the others\n" * 40)
    (tmp_path / "c.txt").write_text("changed\n" * 40)
    made.clear()
    second = prepared("cache")
    assert second != first
    fresh = len(made)
    assert 0 < fresh < every
    made.clear()
    alone = prepared("elsewhere")
    assert len(made) > fresh
    assert content(second) == content(alone)

    # what is damaged is not taken over
    for path in Path(second).glob("shards/*.bin"):
        path.write_bytes(path.read_bytes()[:-2] + b"xx")
    (tmp_path / "d.txt").unlink()
    made.clear()
    third = prepared("cache")
    assert content(third) == content(prepared("elsewhere"))


def test_a_tokenizer_of_another_vocabulary_reuses_nothing() -> None:
    """BPE stops early on little text: another size was asked for, and the tokenizer is the same. Counts of ids are of
    the size that was asked for."""
    small, large = (shards.TokenFormat(size, {"eos": 0}) for size in (4096, 8192))
    assert reuse.tokens_key("{}", small, "") != reuse.tokens_key("{}", large, "")

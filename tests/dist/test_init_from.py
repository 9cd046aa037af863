"""A run that begins with the weights of another: it survives, it tells what is new, and its base may not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from base_run import STEPS, document, run_base
from jobs import curve, rows, weights, write_text
from local_run import drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.compact import PieceTable
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.models.base import base_of


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def base(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_base(text, tmp_path_factory.mktemp("runs"))


def test_it_begins_where_the_base_ended_and_a_kill_changes_no_bit(
    text: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    cache = Path(text).parent / "cache"
    tuned = document(text, init_from=f"{base}@3")
    drive_here(tuned, str(tmp_path / "quiet"), cache)
    # A kill before the first commit: the base is read again, and once more none is needed.
    drive_here(tuned, str(tmp_path / "killed"), cache, faults=("kill@1:2", "kill@0:5/2"))
    assert curve(tmp_path / "quiet") == curve(tmp_path / "killed")
    assert weights(tmp_path / "quiet", STEPS) == weights(tmp_path / "killed", STEPS)
    assert rows(tmp_path / "quiet")[0]["loss"] < rows(base)[0]["loss"] - 0.1
    events = [json.loads(line) for line in (tmp_path / "killed" / "events.jsonl").read_text().splitlines()]
    told = next(event["base"] for event in events if event.get("base"))
    manifest = Store(str(tmp_path / "killed" / "checkpoints")).latest()
    assert manifest is not None
    assert manifest.meta["base"] == told
    assert (told["uri"], told["step"]) == (str(base), 3)


@pytest.mark.slow
def test_a_base_that_changed_is_refused_and_one_that_is_gone_is_not_needed_after_a_commit(
    text: str, base: Path, tmp_path: Path
) -> None:
    cache, mine = Path(text).parent / "cache", tmp_path / "mine"
    shutil.copytree(base, mine)
    tuned = document(text, init_from=f"{mine}@last")
    drive_here(tuned | {"train": tuned["train"] | {"steps": 3}}, str(tmp_path / "run"), cache)
    manifest = mine / "checkpoints" / "step-00000006" / "manifest.json"
    begun = base_of((asked := parse(tuned)).workload, asked.needs_base, {}, False)
    assert begun is not None
    assert begun.step == 6
    store = Store(str(mine / "checkpoints"))
    found = store.manifest(6)
    manifest.unlink()
    store.publish(6, _records(found), {**found.meta, "position": found.position, "receipt": "other"})
    with pytest.raises(InputError, match="have changed"):
        drive_here(tuned, str(tmp_path / "run"), cache)
    shutil.rmtree(mine)
    summary = drive_here(tuned, str(tmp_path / "run"), cache)
    assert (summary["state"], summary["steps"]) == ("done", STEPS)


def _records(manifest: Any) -> list[dict[str, Any]]:
    """The records of a commit's files, as its writers gave them."""
    found = []
    for name, entry in manifest.files.items():
        pieces = [
            ((tensor, each.dtype, each.shape), chunk)
            for tensor, each in manifest.tensors.items()
            for chunk in each.chunks
            if chunk.file == name
        ]
        table = PieceTable([(kind, chunk.start, chunk.shape, chunk.offset) for kind, chunk in pieces])
        sums = b"".join(each for _, chunk in pieces for each in chunk.blocks)
        record = table.record(name, entry.size, b"", manifest.block_bytes, sums)
        found.append(record | {"header_bytes": entry.header_bytes, "header": entry.header.hex()})
    return found

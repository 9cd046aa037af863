"""Runs with Muon, rates by layer and skipped layers, and the deeper run that grows from one: kills change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store

pytestmark = pytest.mark.slow


def with_options(text: str, **workload: Any) -> dict[str, Any]:
    document = job(text, steps=12)
    document["workload"] |= {"layer_drop": 0.25, **workload}
    document["train"]["optimizer"] = {"name": "muon", "layer_decay": 0.8, "lr": 1e-3, "schedule": "constant"}
    document["checkpoint"] = {"every": 2, "keep": 4, "export": None}
    document["parallel"] = {"zero": 1, "micro_batch": 2}
    return document


def twins(document: dict[str, Any], folder: Path, cache: Path) -> tuple[Path, Path]:
    """A run that nothing disturbs, and one whose ranks are killed, on two workers."""
    quiet, killed = folder / "quiet", folder / "killed"
    drive_here(dict(document), str(quiet), cache, gang=lambda: LocalGang([2]))
    drive_here(
        dict(document),
        str(killed),
        cache,
        gang=lambda: LocalGang([2, 2, 2]),
        faults=("kill@1:6", "kill@0:9/2"),
    )
    died = [event["first_fault"] for event in rows(killed, "events.jsonl") if event["first_fault"]]
    assert [fault.split(":")[0] for fault in died] == ["rank 1 on local died", "rank 0 on local died"]
    return quiet, killed


@pytest.mark.timeout(900)
def test_a_kill_changes_no_bit_and_neither_does_one_of_the_deeper_run(tmp_path: Path) -> None:
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    shallow = with_options(text)
    quiet, killed = twins(shallow, tmp_path / "shallow", cache)
    assert curve(killed) == curve(quiet)
    assert weights(killed, 12) == weights(quiet, 12)
    changes = shallow["workload"].get("changes", {})
    layers = 2 * changes.get("layers", 2)
    deeper = with_options(text, changes={**changes, "layers": layers}, init_from=str(quiet), grow="stack")
    first, second = twins(deeper, tmp_path / "deeper", cache)
    assert curve(second) == curve(first)
    assert weights(second, 12) == weights(first, 12)
    store = Store(str(first / "checkpoints"))
    meta = store.manifest(store.steps()[-1]).meta
    assert meta["identity"]["workload"]["grow"] == "stack"
    assert meta["base"]["step"] == 12
    assert rows(first)[0]["loss"] < rows(quiet)[0]["loss"]

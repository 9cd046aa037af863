"""A run that loses a worker and goes on narrower, where bits do not depend on the width."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.controller import decide


def bitwise(text: str) -> dict[str, Any]:
    """A job whose losses and weights have the same bits at every data-parallel width, masks of dropout included."""
    document = job(text, steps=16, determinism="bitwise", virtual_shards=4)
    document["workload"] |= {"dropout": 0.1, "attention_dropout": 0.1}
    document["checkpoint"] = {"every": 2, "keep": 1, "keep_every": 6, "keep_best": True, "export": None}
    # Any rate under which the loss rises in the end, so that the best commit is not the last one.
    document["train"]["optimizer"] = {"lr": 2.0, "warmup": 0, "schedule": "constant"}
    document["parallel"] = {"micro_batch": 2}
    return document


def test_kills_that_change_the_width_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, then one, then two again; against one that nothing disturbs.

    Asked for in Megatron-LM#5785.
    """
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    drive_here(bitwise(text), str(quiet), cache, gang=lambda: LocalGang([1]))
    # A save waits for the one before the last, and no rank is a step ahead of another: when rank 1 begins step 8, the
    # save at 6 has waited for the commit at 2, so there is one to go on from.
    faults = ("kill@1:8", "kill@0:14/2")
    drive_here(bitwise(text), str(killed), cache, gang=lambda: LocalGang([2, 1, 2]), faults=faults)
    found, events = rows(killed), rows(killed, "events.jsonl")
    widths = [width for width, _ in itertools.groupby(row["layout"].split()[0] for row in found)]
    assert widths == ["dp2", "dp1", "dp2"], [(event["phase"], event["reason"]) for event in events]
    died = [event["first_fault"] for event in events if event["first_fault"]]
    assert [fault.split(":")[0] for fault in died] == ["rank 1 on local died", "rank 0 on local died"]
    assert curve(killed) == curve(quiet)
    assert weights(killed, 16) == weights(quiet, 16)
    for run in (quiet, killed):
        assert Store(str(run / "checkpoints")).steps() == sorted({best(rows(run)), 6, 12, 16})
    assert best(found) not in (6, 12, 16)


def best(found: list[dict[str, Any]]) -> int:
    """The commit over whose two steps the mean loss was least."""
    means = {step: found[step - 2]["loss"] + found[step - 1]["loss"] for step in range(2, 17, 2)}
    return min(means, key=means.__getitem__)

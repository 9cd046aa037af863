"""A run with a rank that computes wrongly: it is named, and the run goes back to the last verified commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.controller import decide


def test_a_wrong_rank_leaves_no_bit_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 flips a bit of a product from step 6 on; steps 4 and 8 are verified (torchtitan#4324)."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    document = job(text, steps=8)
    document["resources"] = {"workers": 2, "verify": {"every": 4}}
    document["parallel"] = {"zero": 1, "micro_batch": 2}
    document["checkpoint"] = {"every": 2, "keep": 1, "export": None}
    quiet, wrong = tmp_path / "quiet", tmp_path / "wrong"
    drive_here(document, str(quiet), cache, gang=lambda: LocalGang([2]))
    drive_here(document, str(wrong), cache, gang=lambda: LocalGang([2]), faults=("product@1:6",))
    events = rows(wrong, "events.jsonl")
    (fault,) = [event for event in events if event["first_fault"]]
    assert fault["first_fault"].startswith("rank 1 on local: ")
    assert "step 8: rank 1 differs" in fault["first_fault"]
    assert fault["cause"]["kind"] == "wrong_arithmetic"
    assert fault["wrong_nodes"] == ["local"]
    starts = [event["step"] for event in events if event["phase"] == "start"]
    # The commit of step 4 may still be on its way to storage when step 8 fails.
    assert starts in ([0, 4], [0, 2]), "the commit of step 6 is of a wrong rank"
    assert curve(wrong) == curve(quiet)
    assert weights(wrong, 8) == weights(quiet, 8)
    commit = Store(str(wrong / "checkpoints")).manifest(8)
    assert commit.meta["verified"] == 8
    verified = [row["step"] for row in rows(wrong) if row.get("verified_by") == "other"]
    assert verified == [4, 8]

"""A process that writes commits and is stopped for good: it is replaced, and the run is the one that it would have
been."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jobs import job, rows, write_text
from local_run import LocalGang, drive_here

from cluster.workers.gang import GangStatus
from orchestrator.checkpoint.commit_store import Store

STEPS = 40


class Stopping(LocalGang):
    """Stops the writing process of one rank for good once step 4 is done."""

    def __init__(self) -> None:
        super().__init__([2])
        self._stopped = False

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        beat = super().poll(saved, wait)
        if not self._stopped and max((rank.step for rank in beat.ranks), default=0) >= 4:
            family = psutil.Process().children(recursive=True)
            next(p for p in family if "orchestrator.checkpoint.sidecar" in p.cmdline()).suspend()
            self._stopped = True
        return beat


def drive(tmp_path: Path, name: str, gang: Any) -> dict[str, Any]:
    document = job(write_text(tmp_path, 20_000), steps=STEPS)
    document["checkpoint"] = {"every": 1, "keep": 3, "export": None}
    return drive_here(document, str(tmp_path / name), tmp_path / "cache", gang=gang)


@pytest.mark.slow
def test_a_run_whose_writing_process_is_stopped_is_equal_to_a_quiet_one(tmp_path: Path) -> None:
    one, other = drive(tmp_path, "quiet", lambda: LocalGang([2])), drive(tmp_path, "run", Stopping)
    assert (one["state"], other["state"], other["attempts"]) == ("done", "done", 1)
    why = re.compile(
        "gave no answer for 60 s|writers .1. have failed"
    )  # of the rank that publishes, or of the other
    lost, resumed = [], []
    for event in rows(tmp_path / "run", "events.jsonl"):
        lost += [event["reason"]] if why.search(event["reason"]) else []
        resumed += [event["reason"]] if event["reason"].startswith("saving resumes") else []
    assert lost
    assert len(resumed) == 1
    told = [[(row["loss"], row["samples"]) for row in rows(tmp_path / name)] for name in ("quiet", "run")]
    assert told[0] == told[1]
    stores = [Store(str(tmp_path / name / "checkpoints")) for name in ("quiet", "run")]
    commits = [store.manifest(STEPS) for store in stores]
    readers = [store.reader(commit) for store, commit in zip(stores, commits, strict=True)]
    for name in commits[0].tensors:
        assert torch.equal(*(reader.read(name) for reader in readers)), name

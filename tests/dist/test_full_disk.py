"""A disk that is full for a while, under the whole run directory: real ranks, a real file system, the real ENOSPC."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jobs import job, rows, write_text
from local_run import LocalGang, drive_here
from tmpfs import mounted

from cluster.workers.gang import GangStatus
from orchestrator.checkpoint.commit_store import Store

STEPS = 150


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    with mounted(tmp_path / "disk", "6m") as folder:
        yield folder


@dataclass
class Filler:
    """Fills the disk but for `room` bytes once step 40 is done, and frees it 30 steps after a save has failed, or
    fills it again and again.

    `failed` has every save that failed, and what was left of it when that was heard.
    """

    disk: Path
    frees: bool = True
    room: int = 0
    filled_at: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)

    def look(self, beat: GangStatus) -> None:
        step = max((rank.step for rank in beat.ranks), default=0)
        if step >= 40 and not (self.filled_at and self.frees):
            self.filled_at = self.filled_at or step
            self.fill()
        for save in (save for row in beat.rows for save in row["saves"] if save["state"] == "failed"):
            self.failed[save["step"]] = self.left(save["step"])
        if self.frees and self.failed and step > min(self.failed) + 30:
            (self.disk / "filler").unlink(missing_ok=True)

    def left(self, step: int) -> list[str]:
        """What there is of a save that failed, once the other rank has had the time to hear of it."""
        half, end = self.disk / f"run/checkpoints/step-{step:08d}", time.monotonic() + 5
        while half.exists() and (found := os.listdir(half)):
            if time.monotonic() > end:
                return found
            time.sleep(0.02)
        return []

    def fill(self) -> None:
        with open(self.disk / "filler", "ab", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    continue
            except OSError:
                file.truncate(max(file.tell() - self.room, 0))


class Watched(LocalGang):
    """A gang of two local processes whose beats the filler sees first."""

    def __init__(self, filler: Filler) -> None:
        super().__init__([2])
        self._filler = filler

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        beat = super().poll(saved, wait)
        self._filler.look(beat)
        return beat


def drive(disk: Path, filler: Filler, tmp_path: Path, steps: int = STEPS, **limits: Any) -> dict[str, Any]:
    """A run whose directory is on the disk, and whose data is not; its summary."""
    document = job(write_text(tmp_path, 20_000), steps=steps)
    document["checkpoint"] = {"every": 10, "keep": 2, "export": None}
    document["limits"] = limits
    return drive_here(document, str(disk / "run"), tmp_path / "cache", gang=lambda: Watched(filler))


def told(run: Path) -> list[str]:
    """What the user was told while it trained."""
    return [event["reason"] for event in rows(run, "events.jsonl") if event["phase"] == "train"]


def test_a_full_disk_pauses_saving_and_nothing_else(disk: Path, tmp_path: Path) -> None:
    filler, run = Filler(disk), disk / "run"
    summary = drive(disk, filler, tmp_path)
    assert (summary["state"], summary["step"], summary["attempts"], summary["commit"]) == (
        "done",
        STEPS,
        1,
        STEPS,
    )
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert filler.failed
    assert set(map(tuple, filler.failed.values())) == {()}, "half a commit was left"
    lines = told(run)
    why = re.compile("failed: .*(No space left on device|could not report it)")
    failed = [n for n, text in enumerate(lines) if why.search(text)]
    resumed = [n for n, text in enumerate(lines) if text.startswith("saving resumes with the commit at step")]
    assert len(failed) == len(filler.failed), lines
    assert min(failed) < min(resumed)
    store = Store(str(run / "checkpoints"))
    assert STEPS in store.steps()
    assert {step: store.verify(step) for step in store.steps()} == {step: [] for step in store.steps()}


@pytest.mark.slow
def test_a_disk_that_stays_full_stops_the_run_at_its_limit(disk: Path, tmp_path: Path) -> None:
    """With room for all rows but no checkpoint; once there is room, the same command continues from the last one."""
    filler, run = Filler(disk, frees=False, room=200_000), disk / "run"
    summary = drive(disk, filler, tmp_path, steps=150, unsaved=0.3)
    assert summary["state"] == "stopped", (filler, told(run))
    assert summary["reason"].startswith("limits.unsaved is reached: every save has failed for")
    assert 0 < summary["commit"] < min(filler.failed)
    faults = [event["first_fault"] for event in rows(run, "events.jsonl") if event["first_fault"]]
    assert faults  # more than one where a task came to its end
    why = r"rank 0 on local: OSError: the commit at step \d+ failed: .*No space left on device"
    assert all(re.search(why, fault) for fault in faults), faults
    (disk / "filler").unlink()
    again = drive(disk, Filler(disk, filled_at=1), tmp_path, steps=150)
    assert (again["state"], again["commit"]) == ("done", 150)
    assert [row["step"] for row in rows(run)] == list(range(1, 151))
    starts = [event["reason"] for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    assert starts[-1] == f"2 workers in fp32 from the commit at step {summary['commit']}"

"""A run whose prepared data is deleted while it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here
from prepared import prepare_here

from cluster.workers.gang import GangStatus
from orchestrator.data import prepare
from orchestrator.job.spec import parse


class Losing(LocalGang):
    """A gang that loses a folder once it has done a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__([2])
        self._folder = folder

    def poll(self, *arguments: Any) -> GangStatus:
        """See `Gang.poll`."""
        beat = super().poll(*arguments)
        if any(row["step"] == 1 for row in beat.rows):
            shutil.rmtree(self._folder)
        return beat


def test_the_next_attempt_makes_it_again_and_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    quiet, lost = tmp_path / "quiet", tmp_path / "lost"
    drive_here(job(text), str(quiet), cache)
    made = []

    def make(folder: Any, *_: Any) -> None:
        """What tasks of Ray do elsewhere."""
        assert not cache.exists()
        made.append(prepare_here(parse(document), str(cache)))
        assert made[-1] == folder.uri

    monkeypatch.setattr(prepare, "_make", make)
    document = job(text)
    summary = drive_here(document, str(lost), cache, gang=lambda: Losing(cache), faults=("kill@1:7",))
    assert (summary["state"], len(made)) == ("done", 1)
    phases = [event["phase"] for event in rows(lost, "events.jsonl")]
    assert phases == [
        "prepare",
        "wait",
        "start",
        "train",
        "stop",
        "wait",
        "prepare",
        "wait",
        "start",
        "train",
        "stop",
        "done",
    ]
    assert curve(lost) == curve(quiet)
    assert weights(lost, 12) == weights(quiet, 12)

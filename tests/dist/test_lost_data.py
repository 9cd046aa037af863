"""A run whose prepared data is deleted while it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here
from prepared import prepare_here

from cluster.workers.gang import GangStatus
from orchestrator.config.spec import parse
from orchestrator.data.prepare import prepare
from orchestrator.export.hugging_face import export


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

    def make(preparation: Any, *_: Any, **__: Any) -> None:
        """What tasks of Ray do elsewhere."""
        assert not cache.exists()
        made.append(prepare_here(parse(document), str(cache)))
        assert made[-1] == preparation.folder.uri

    monkeypatch.setattr(prepare.Preparation, "make", make)
    document = job(text)
    # The pause lets the commit at step 4 be published: at milliseconds a step it may still be on its way.
    faults = ("slow@1:6=3", "kill@1:7")
    summary = drive_here(document, str(lost), cache, gang=lambda: Losing(cache), faults=faults)
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
    (stop,) = [event for event in rows(lost, "events.jsonl") if event["first_fault"]]
    assert stop["first_fault"].startswith("rank 1 on local died")
    # Rank 1 dies as it begins step 7, when rank 0 may not have told of step 6 yet.
    assert stop["step"] in (5, 6)
    assert stop["lost_steps"] in (1, 2)
    assert summary["attempts"] == 2
    assert summary["ledger"]["seconds"]["lost_work"] > 0


def test_a_training_whose_data_is_removed_meanwhile_ends_well(tmp_path: Path) -> None:
    """The text is gone too, and an export takes nothing but what the run directory has."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    document = job(write_text(cache / "corpus", 20_000), steps=8)
    summary = drive_here(document, str(run), cache, gang=lambda: Losing(cache), faults=("slow@1:2=0.2",))
    assert (summary["state"], summary["attempts"], cache.exists()) == ("done", 1, False)
    assert [row["step"] for row in rows(run)] == list(range(1, 9))
    export(str(run), 8, str(tmp_path / "export"))
    assert json.loads((tmp_path / "export/export.json").read_text())["step"] == 8

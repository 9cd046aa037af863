"""A finished run that is extended is, bit for bit, the run that was that long from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import load
from orchestrator.controller import decide
from orchestrator.launch.finished import PastRun
from orchestrator.storage.run_directory import RunDir

SHORT, LONG, DECAY = 12, 20, 4
SCHEDULES = {"constant": {"schedule": "constant"}, "wsd": {"schedule": "wsd", "decay": DECAY}}


def document(text: str, schedule: str, steps: int) -> dict[str, Any]:
    """A job whose periodic commits are not where the decay begins."""
    optimizer = {"lr": 3e-3, "warmup": 2, **SCHEDULES[schedule]}
    found = job(text, steps=steps, optimizer=optimizer)
    found["checkpoint"] = {"every": 5, "keep": 1, "export": None}
    found["parallel"] = {"micro_batch": 2}
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.mark.parametrize(
    ("schedule", "faults"),
    [
        pytest.param("constant", ("kill@1:15/2",), marks=pytest.mark.slow),
        pytest.param("wsd", ("kill@0:10/2", "kill@1:18/3"), marks=pytest.mark.slow),
    ],
)
def test_an_extended_run_has_the_bits_of_a_long_one(
    text: str,
    schedule: str,
    faults: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked for in maxtext#2882."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    run, quiet, cache = tmp_path / "run", tmp_path / "quiet", Path(text).parent / "cache"
    drive_here(document(text, schedule, LONG), str(quiet), cache)
    drive_here(document(text, schedule, SHORT), str(run), cache)
    begun = SHORT - DECAY if schedule == "wsd" else SHORT
    assert Store(str(run / "checkpoints")).steps() == sorted({begun, SHORT})
    assert (curve(run) == curve(quiet)[:SHORT]) == (schedule == "constant")
    finished = load(run / "job.yaml")
    assert PastRun(finished, RunDir(str(run))).done()

    summary = drive_here(
        document(text, schedule, LONG), str(run), cache, gang=lambda: LocalGang([2]), faults=faults
    )
    assert (summary["state"], summary["step"], summary["steps"], summary["commit"]) == (
        "done",
        LONG,
        LONG,
        LONG,
    )
    assert summary["receipt"] == rows(quiet)[-1]["samples"]
    assert curve(run) == curve(quiet)
    assert [row["lr"] for row in rows(run)] == [row["lr"] for row in rows(quiet)]
    assert weights(run, LONG) == weights(quiet, LONG)

    events = rows(run, "events.jsonl")
    (extended,) = [event for event in events if event.get("extended")]
    assert extended["reason"] == f"resumed: extended from {SHORT} to {LONG} steps, from step {begun} on"
    told = {"before": SHORT, "after": LONG, "settled": begun, "step": begun}
    assert (extended["extended"], extended["lost_steps"]) == (told, SHORT - begun)
    starts = [event["step"] for event in events if event["phase"] == "start"]
    assert starts[:2] == [0, begun]
    assert len(starts) == 2 + len(faults)
    longer = load(run / "job.yaml")
    assert longer.train.steps == LONG
    assert PastRun(longer, RunDir(str(run))).done()

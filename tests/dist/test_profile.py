"""A live run is profiled: traces and tables are there, and no bit of it changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, weights, write_text
from local_run import LocalGang, controller_here, drive_here

from cluster.workers.gang import GangStatus

STEPS = 40


class ProfiledGang(LocalGang):
    """Asks for a profile of both ranks once training is under way, and for one that cannot be written."""

    def __init__(self, rooms: list[int]) -> None:
        super().__init__(rooms)
        self.asked, self._at = 0, 0

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        status = super().poll(saved, wait)
        step = min((rank.step for rank in status.ranks), default=0)
        # The second once the first is done: of two requests at a time the latter counts.
        if self.asked < 2 and step >= (2 if self.asked == 0 else self._at + 8):
            name, self._at = ("first", "job.yaml/in-a-file")[self.asked], step
            self.asked += 1
            self.ask_profile({"id": name, "ranks": [0, 1], "steps": 2})
        return status


def test_a_profile_is_written_and_changes_no_bit(tmp_path: Path) -> None:
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    quiet, profiled = tmp_path / "quiet", tmp_path / "profiled"
    drive_here(document(text), str(quiet), cache)
    gang = ProfiledGang([2])
    (profiled / "profiles").mkdir(parents=True)
    (profiled / "events.jsonl").touch()
    (profiled / "profiles" / "job.yaml").touch()
    slow = ("slow@0:1=0.05",)  # so that it has not ended before it is asked
    summary = controller_here(document(text), str(profiled), cache, gang=lambda: gang, faults=slow).drive()
    assert summary["state"] == "done"
    assert summary["attempts"] == 1
    assert gang.asked == 2
    assert curve(profiled) == curve(quiet)
    assert weights(profiled, STEPS) == weights(quiet, STEPS)
    for rank in (0, 1):
        found = json.loads((profiled / f"profiles/first/rank-{rank}.json").read_text())
        first, last = found["steps"]
        assert last == first + 1
        assert found["rank"] == rank
        names = [row["name"] for row in found["operators"]]
        assert any(name in names for name in ("aten::mm", "aten::addmm", "aten::bmm")), names
        assert found["communication"], names
        assert sum(row["cpu_seconds"] for row in found["operators"]) > 0
        trace = json.loads(
            gzip.decompress((profiled / f"profiles/first/rank-{rank}.trace.json.gz").read_bytes())
        )
        assert trace["traceEvents"]
    logs = "".join(path.read_text() for path in (profiled / "logs").rglob("rank-*.log"))
    assert logs.count("the profile failed: ") == 2


def document(text: str) -> dict[str, Any]:
    found = job(text, steps=STEPS)
    found["checkpoint"] = {"every": 20, "export": None}
    return found


@pytest.mark.slow
def test_a_gang_that_hangs_leaves_the_collectives_that_it_waits_in(tmp_path: Path) -> None:
    """Rank 1 is frozen in step 5: rank 0 tells of the collective that it waits in, and where in Python.

    Asked for in ray#64993.
    """
    text, run = write_text(tmp_path, 20_000), tmp_path / "run"
    summary = drive_here(document(text), str(run), tmp_path / "cache", faults=("stop@1:5",))
    assert (summary["state"], summary["attempts"]) == ("done", 2)
    recorded = json.loads((run / "profiles/hang-attempt-1/rank-0.gloo.json").read_text())
    names = {entry["profiling_name"] for entry in recorded["entries"]}
    assert any(name.startswith("gloo:") for name in names), names
    log = (run / "logs/attempt-1/rank-0.log").read_text()
    assert "step 5: collective " in log
    assert "most recent call first" in log

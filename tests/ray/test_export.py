"""Exports at the end of real runs: an encoder with a decoder leaves, and what cannot be written is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import job, orchestrator, rows, write_job, write_text
from prepared import with_data

pytestmark = pytest.mark.slow


def test_a_pair_of_stacks_leaves(tmp_path: Path) -> None:
    document = job(write_text(tmp_path / "corpus"), steps=4)
    document["workload"] = {"model": "switch-tiny", "objective": "span_corruption", "changes": {"hidden": 32}}
    document["checkpoint"] |= {"export": "hf"}
    done = orchestrator("run", write_job(tmp_path, document), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = json.loads((tmp_path / "runs/small/export/export.json").read_text())
    assert exported["logits_difference"] <= 1e-5


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    document = with_data(job(write_text(tmp_path / "corpus"), steps=4), tmp_path / "data")
    document["resources"]["workers"] = 1
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "export"
    document["checkpoint"] |= {"export": "hf", "export_to": str(place)}
    failed = orchestrator("run", write_job(tmp_path, document), cwd=tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    told = [
        e["reason"] for e in rows(tmp_path / "runs/small", "events.jsonl") if "step 4 failed:" in e["reason"]
    ]
    assert told[-1].startswith("the export of step 4 failed: ")
    assert str(tmp_path / "file") in told[-1]
    assert not any(word in told[-1] for word in ("\n", "ray::", "Traceback"))

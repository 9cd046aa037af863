"""Exports at the end of real runs: an encoder and a decoder leave, and what cannot be written is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

from jobs import job, orchestrator, rows, write_job, write_text


def test_a_pair_of_stacks_leaves_and_a_place_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path,
) -> None:
    document = job(write_text(tmp_path / "corpus"), steps=4)
    document["workload"] = {"model": "switch-tiny", "objective": "span_corruption", "changes": {"hidden": 32}}
    document["checkpoint"] |= {"export": "hf", "every": 2}
    done = orchestrator("run", write_job(tmp_path, document), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = json.loads((tmp_path / "runs/small/export/export.json").read_text())
    assert exported["logits_difference"] <= 1e-5

    (tmp_path / "file").write_text("in the way")
    document["name"] = "other"
    document["checkpoint"]["export_to"] = str(tmp_path / "file" / "export")
    failed = orchestrator("run", write_job(tmp_path, document), cwd=tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    (told,) = [e["reason"] for e in rows(tmp_path / "runs/other", "events.jsonl") if "failed:" in e["reason"]]
    place = tmp_path / "file" / "export"
    assert told == (
        f"the export of step 4 failed: InputError: {place}: cannot be written (Not a directory); give another folder"
    )

"""Exports at the end of real runs: an encoder with a decoder leaves, and what cannot be written is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from jobs import job, kill_tree, orchestrator, rows, started, status, wait_for, write_job, write_text
from prepared import with_data

from orchestrator.export.hugging_face import export

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
    place, run = tmp_path / "file" / "export", tmp_path / "runs/small"
    document["checkpoint"] |= {"export": "hf", "export_to": str(place)}
    with started("run", write_job(tmp_path, document), cwd=tmp_path) as process:
        wait_for(lambda: (run / "job.yaml").exists(), "the run to be checked")
        (tmp_path / "file").write_text("in the way")
        assert process.wait(timeout=240) == 1, (tmp_path / "output.txt").read_text()
    problem = json.loads((run / "summary.json").read_text())["problem"]
    assert problem.startswith("the export failed: ")
    assert problem in (tmp_path / "output.txt").read_text()
    told = [
        e["reason"] for e in rows(tmp_path / "runs/small", "events.jsonl") if "step 4 failed:" in e["reason"]
    ]
    assert told[-1].startswith("the export of step 4 failed: ")
    assert str(tmp_path / "file") in told[-1]
    assert not any(word in told[-1] for word in ("\n", "ray::", "Traceback"))


@pytest.mark.parametrize("victim", ["export", "controller", "all"])
def test_a_kill_in_the_middle_of_an_export_costs_only_time(tmp_path: Path, victim: str) -> None:
    """Of the process that exports, of the controller, or of everything, after which the same command is given again."""
    document = job(write_text(tmp_path / "corpus"), steps=4)
    document["checkpoint"] |= {"export": "hf"}
    document["workload"]["changes"] |= {"hidden": 512, "layers": 6}  # of which an export takes a while
    path, run = write_job(tmp_path, document), tmp_path / "runs" / "small"
    with started("run", path, cwd=tmp_path) as process:
        wait_for(lambda: [*run.glob(".export.*.tmp/*")], "the export to be written")
        if victim == "all":
            kill_tree(process.pid)
            assert [*run.glob(".export.*.tmp")], "killed in its middle"
            assert not (run / "export").exists()
            assert orchestrator("run", path, cwd=tmp_path).returncode == 0
        else:
            pid = status(run)["pid"] if victim == "controller" else exporter(process.pid)
            psutil.Process(pid).kill()
            assert process.wait(timeout=240) == 0, (tmp_path / "output.txt").read_text()
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["state"] == "done"
    assert json.loads((run / "export/export.json").read_text())["step"] == 4
    export(str(run), 4, str(tmp_path / "twin"))
    for file in sorted((tmp_path / "twin").iterdir()):
        assert (run / "export" / file.name).read_bytes() == file.read_bytes(), file.name
    assert [path.name for path in run.rglob("*.tmp")] == []


def exporter(driver: int) -> int:
    """The copy of the process with all imports that runs the export; those of the ranks have ended."""
    family = psutil.Process(driver).children(recursive=True)
    return next(p.pid for p in family if p.cmdline() == psutil.Process(p.ppid()).cmdline())

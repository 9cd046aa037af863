"""A run that the version before began and left goes on with the samples that it would have had there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from before import unpack
from jobs import rows
from local_run import LocalGang
from scripted import SnapshotServers

from cluster.workers.cluster import Cluster
from cluster.workers.machine import Offer
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage


def drive(run: RunDir) -> dict[str, Any]:
    """Go on with the run at `run` to its end; its data is there, and needs no Ray."""
    cluster = Cluster(
        gang=lambda: LocalGang([1]),
        offer=lambda bundle, most: Offer(8e9),
        run_task=lambda *call, **_: pytest.fail("nothing is exported"),
        services=SnapshotServers,
    )
    spec = parse(yaml.safe_load(run.read_text("job.yaml") or ""))
    return Controller(spec, run, None, cluster, ()).drive()


def test_an_old_run_goes_on_as_the_same_run(tmp_path: Path) -> None:
    before = unpack(tmp_path)
    summary = drive(RunDir(str(before / "run")))
    assert (summary["state"], summary["step"]) == ("done", 12)
    found = [(row["step"], row["samples"]) for row in rows(before / "run")]
    curve = json.loads((before / "curve.json").read_text())
    assert found == [(step, receipt) for step, _, receipt in curve]
    losses = [row["loss"] for row in rows(before / "run")]
    assert losses == pytest.approx([loss for _, loss, _ in curve], rel=1e-5)


def test_a_trial_that_exploits_an_old_one_goes_on_with_its_samples(tmp_path: Path) -> None:
    """The search is resumed with this version: a new run begins with a commit over data of the version before."""
    before = unpack(tmp_path)
    (before / "run").rename(before / "0001")
    (taken,) = Store(str(before / "0001" / "checkpoints")).steps()
    name = lineage.exploit(RunDir(str(before)), "0000", "0001", taken, {})
    shutil.copy(before / "0001" / "job.yaml", before / name)
    assert drive(RunDir(str(before / name)))["state"] == "done"
    found = [(row["step"], row["samples"]) for row in rows(before / name) if row["step"] > taken]
    curve = json.loads((before / "curve.json").read_text())
    assert found == [(step, receipt) for step, _, receipt in curve if step > taken]

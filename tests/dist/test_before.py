"""A run that the version before began and left goes on with the samples that it would have had there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from before import unpack
from jobs import rows
from local_run import LocalGang
from scripted import Holders

from cluster.machine import Offer
from cluster.place import Cluster
from orchestrator.controller import Controller
from orchestrator.rundir import RunDir
from orchestrator.spec import parse


def test_an_old_run_goes_on_as_the_same_run(tmp_path: Path) -> None:
    before = unpack(tmp_path)
    run = RunDir(str(before / "run"))
    cluster = Cluster(
        gang=lambda: LocalGang([1]),
        offer=lambda bundle: Offer(8e9),
        errand=lambda *call: pytest.fail("nothing is exported"),
        services=Holders,
    )
    spec = parse(yaml.safe_load((before / "run" / "job.yaml").read_text()))
    summary = Controller(spec, run, None, cluster, ()).drive()
    assert (summary["state"], summary["step"]) == ("done", 12)
    found = [(row["step"], row["samples"]) for row in rows(before / "run")]
    curve = json.loads((before / "curve.json").read_text())
    assert found == [(step, receipt) for step, _, receipt in curve]
    losses = [row["loss"] for row in rows(before / "run")]
    assert losses == pytest.approx([loss for _, loss, _ in curve], rel=1e-5)

"""A run that an earlier version began and left goes on with the samples and the draws that it would have had there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from before import unpack
from jobs import curve, rows, weights
from local_run import LocalGang
from scripted import SnapshotServers

from cluster.workers.cluster import Cluster
from cluster.workers.machine import Offer
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.controller.controller import Controller
from orchestrator.parallel.arithmetic import ARITHMETIC, NEWEST, Arithmetic
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.rollouts.stored_rollouts import read_kept
from orchestrator.tune import lineage


def drive(run: RunDir, rooms: tuple[int, ...] = (1,), faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Go on with the run at `run` to its end; its data is there, and needs no Ray."""
    cluster = Cluster(
        gang=lambda: LocalGang([*rooms]),
        offer=lambda bundle, most: Offer(8e9),
        run_task=lambda *call, **_: pytest.fail("nothing is exported"),
        services=SnapshotServers,
    )
    spec = parse(yaml.safe_load(run.read_text("job.yaml") or ""))
    return Controller(spec, run, None, cluster, faults).drive()


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


def test_an_old_run_that_learns_from_rewards_draws_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bitwise GRPO run of the version before `Arithmetic.READ_ANSWERS`, stopped at step 3.

    Step 4 has the answers and the receipt that it has had there; later ones may differ in rounding on another CPU. The
    run has the same bits if it is killed and goes on at another width. The same commit would draw other answers if it
    did not say which version began it.
    """
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    found = {}
    for name, how in (
        ("quiet", {}),
        ("killed", {"rooms": (2, 1, 2), "faults": ("kill@1:5", "kill@0:7/2")}),
        ("new", {}),
    ):
        before = unpack(tmp_path / name, "drafted")
        found[name] = run = before / "run"
        store = Store(str(run / "checkpoints"))
        manifest = store.manifest(3)
        assert manifest.meta[ARITHMETIC] == Arithmetic.LABELLED_TOKENS
        if name == "new":
            newer = dataclasses.replace(manifest, meta={**manifest.meta, ARITHMETIC: NEWEST})
            (run / "checkpoints/step-00000003/manifest.json").write_bytes(newer.to_bytes())
        summary = drive(RunDir(str(run)), **how)
        assert (summary["state"], summary["step"]) == ("done", 8)
    expected = json.loads((before / "curve.json").read_text())[:4]
    quiet, killed, new = found.values()
    assert [(row["step"], row["samples"]) for row in rows(quiet)[:4]] == [
        (step, receipt) for step, receipt, _ in expected
    ]
    assert [line["answer"] for line in read_kept(str(quiet), 4)[1]] == expected[3][2]
    assert all(row["sampler_difference"] > 0 for row in rows(quiet))
    assert curve(killed) == curve(quiet)
    assert weights(killed, 8) == weights(quiet, 8)
    assert [row["sampler_difference"] for row in rows(new)[3:]] == [0.0] * 5
    assert [line["answer"] for line in read_kept(str(new), 4)[1]] != expected[3][2]

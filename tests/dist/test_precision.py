"""A run whose job leaves its precision open trains in the one that was chosen when it began, for life."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_chain import drive_chain_here
from local_run import drive_here

from orchestrator.chain import preflight as chain_checks
from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import load, parse
from orchestrator.launch import preflight as checks
from orchestrator.launch.preflight import preflight
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load as profile
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import Precision

SLOW_HALVES, SLOW_FULL = {"flops": 1e9}, {"full_flops": 1e9}
"""Of a processor, by which fp32 is chosen, and bf16."""


def machine_with(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float]) -> None:
    """From now on runs here are planned for such a processor."""

    def worker_of(_: ResourceSpec, precision: Precision) -> Machine:
        return replace(profile("cpu-core").machine(precision), **rates)

    for module in (checks, chain_checks):
        monkeypatch.setattr(module, "worker_at", lambda address: worker_of)


def go_on(document: dict[str, Any], run: Path, cache: Path) -> dict[str, Any]:
    """Begin the run, or go on, as the command does: what was checked is what is driven."""
    found = preflight(parse(document), RunDir(str(run)), None, None)
    return drive_here(found.spec.model_dump(mode="json"), str(run), cache)


@pytest.mark.parametrize(
    ("began", "now", "precision"),
    [
        (SLOW_HALVES, SLOW_FULL, "fp32"),
        pytest.param(SLOW_FULL, SLOW_HALVES, "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_keeps_its_precision_where_another_would_be_chosen_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: Any, now: Any, precision: str
) -> None:
    text, cache = write_text(tmp_path, 20_000), tmp_path / "cache"
    constant = {"lr": 3e-3, "schedule": "constant"}
    open_job = job(text, precision="auto", steps=4, optimizer=constant)
    longer = job(text, precision="auto", steps=8, optimizer=constant)
    named = job(text, precision=precision, steps=8, optimizer=constant)
    run, whole = tmp_path / "run", tmp_path / "whole"
    machine_with(monkeypatch, began)
    first = go_on(open_job, run, cache)
    assert (first["precision"], first["step"]) == (precision, 4)
    assert load(run / "job.yaml").train.precision == precision

    machine_with(monkeypatch, now)
    (run / "job.yaml").unlink()  # its commits know it too
    other = "bf16" if precision == "fp32" else "fp32"
    with pytest.raises(InputError, match=f"train.precision is '{precision}' in this run and '{other}'"):
        preflight(
            parse(job(text, precision=other, steps=8, optimizer=constant)), RunDir(str(run)), None, None
        )
    summary = go_on(longer, run, cache)
    assert (summary["precision"], summary["step"], summary["state"]) == (precision, 8, "done")
    starts = [event for event in rows(run, "events.jsonl") if event["phase"] == "start"]
    assert [event["precision"] for event in starts] == [precision, precision]
    assert all(f"workers in {precision} from" in event["reason"] for event in starts)

    drive_here(named, str(whole), cache)
    assert curve(run) == curve(whole)
    assert weights(run, 8) == weights(whole, 8)


def test_each_stage_of_a_chain_trains_in_a_precision_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a chain that is done stays done where another would be chosen now."""
    document = job(write_text(tmp_path, 20_000), steps=4, precision="auto") | {"name": "c"}
    document["stages"] = [
        {"name": "base"},
        {"name": "more", "workload": {"init_from": "stage:base"}, "seed": 5},
    ]
    root, cache = tmp_path / "chain", tmp_path / "cache"
    machine_with(monkeypatch, SLOW_FULL)
    found = drive_chain_here(document, root, cache, monkeypatch)
    assert found.outcome == Outcome.DONE, found
    assert [load(root / name / "job.yaml").train.precision for name in ("base", "more")] == ["bf16", "bf16"]
    machine_with(monkeypatch, SLOW_HALVES)
    chain, place = parse_chain(document), RunDir(str(root))
    assert check_chain(chain, stage_runs(chain, place), place, None) == {"base", "more"}

"""One run on two engines: killed on torch, killed on DeepSpeed, ended on torch, and the same run throughout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from prepared import prepare_here

from cluster.workers.gang import Bundle
from cluster.workers.process_gang import ProcessGang
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import ENTRY, Task

STEPS = 12
TOLERANCE = 1e-5
"""Relative, of losses and gradient norms; of weights and optimiser state against the largest of each tensor, with
Adam's eps at 1e-4 (see `harness.TOLERANCE`)."""
Row = dict[str, Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, str]:
    folder = tmp_path_factory.mktemp("data")
    document = job(write_text(folder), steps=STEPS, optimizer={"lr": 3e-3, "warmup": 2, "eps": 1e-4})
    spec = parse(document)
    return spec, prepare_here(spec, str(folder / "cache"))


def walk(
    prepared: tuple[JobSpec, str], run: Path, layouts: list[Layout], gang: ProcessGang
) -> dict[int, Row]:
    """Every layout but the last is killed in the second step after its first commit. Returns the last row of each
    step."""
    rows: dict[int, Row] = {}
    restore: int | None = None
    for number, layout in enumerate(layouts, start=1):
        last = number == len(layouts)
        step = STEPS if last else 4 * number
        fault = () if last else (f"stop@{layout.world - 1}:{step + 2}/{number}",)
        for row in attempt(prepared, run, layout, number, restore, step, fault, gang):
            rows[row["step"]] = row
        restore = max(Store(f"{run}/checkpoints").steps())
        assert restore == step
    return rows


def attempt(
    prepared: tuple[JobSpec, str],
    run: Path,
    layout: Layout,
    number: int,
    restore: int | None,
    step: int,
    faults: tuple[str, ...],
    gang: ProcessGang,
) -> list[Row]:
    """One gang, killed once its commit of `step` is there; with a fault, some rank stands still later on by then.

    Returns the rows of its steps: those that were told, and those that only the commit has.
    """
    spec, data = prepared
    task = Task(spec.model_dump(mode="json"), layout.to_json(), str(run), data, number, restore, STEPS,
                token=f"attempt{number}", faults=faults)  # fmt: skip
    rows: list[Row] = []
    store = Store(f"{run}/checkpoints")
    try:
        gang.start(layout.world, Bundle(), ENTRY, task.to_json())
        deadline = time.monotonic() + 280
        while step not in store.steps():
            assert time.monotonic() < deadline, f"{layout} has no commit of step {step}"
            beat = gang.poll(0)
            rows += beat.rows
            assert not any(r.state in ("failed", "dead") for r in beat.ranks), [r.error for r in beat.ranks]
            time.sleep(0.02)
    finally:
        gang.stop()
    return [*rows, *store.manifest(step).meta["rows"]]


@pytest.fixture(scope="module")
def undisturbed(
    prepared: tuple[JobSpec, str], tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang
) -> tuple[Path, dict[int, Row]]:
    run = tmp_path_factory.mktemp("undisturbed")
    return run, walk(prepared, run, [Layout(micro_batch=2)], gang)


def check(run: Path, rows: dict[int, Row], undisturbed: tuple[Path, dict[int, Row]]) -> None:
    """The receipt is equal, and losses, norms and the last commit are within the tolerance."""
    other, expected = undisturbed
    assert sorted(rows) == sorted(expected) == list(range(1, STEPS + 1))
    for key in ("samples", "tokens", "lr"):
        assert [rows[s][key] for s in rows] == [expected[s][key] for s in rows]
    for key in ("loss", "grad_norm"):
        torch.testing.assert_close(
            [rows[s][key] for s in rows], [expected[s][key] for s in rows], rtol=TOLERANCE, atol=0
        )
    stores = [Store(f"{folder}/checkpoints") for folder in (run, other)]
    mine, theirs = (store.reader(store.manifest(STEPS)) for store in stores)
    assert mine.manifest.receipt == theirs.manifest.receipt
    assert mine.manifest.tensors.keys() == theirs.manifest.tensors.keys()
    for name in theirs.manifest.tensors:
        found, wanted = mine.read(name), theirs.read(name)
        size = max(float(wanted.abs().max()), 0.1)
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=TOLERANCE * size, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_run_that_changes_engines_and_widths_is_the_same_run(
    prepared: tuple[JobSpec, str],
    undisturbed: tuple[Path, dict[int, Row]],
    width: int,
    tmp_path: Path,
    gang: ProcessGang,
) -> None:
    layouts = [
        Layout(dp=2, zero=2, micro_batch=2),
        Layout(dp=width, zero=3, micro_batch=2, engine="deepspeed"),
        Layout(dp=2, zero=1, micro_batch=4),
    ]
    rows = walk(prepared, tmp_path, layouts, gang)
    used = {row["attempt"]: row["layout"] for row in rows.values()}
    assert used == {number: str(layout) for number, layout in enumerate(layouts, start=1)}
    check(tmp_path, rows, undisturbed)

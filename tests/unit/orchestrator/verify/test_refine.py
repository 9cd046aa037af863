"""Which runs refine a profile, and what they change of it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import job, write_text

from cluster.workers.machine import this_machine
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout
from orchestrator.planner.choose_layout import predict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import Profile, load, read, store
from orchestrator.resolve.resolved_job import resolve
from orchestrator.storage.run_directory import RunDir
from orchestrator.verify.refine import FEWEST, delay_of, refine, undo

LAYOUT = Layout(dp=2, micro_batch=4)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return parse(job(write_text(tmp_path, 20_000)))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "machine.yaml"
    store(load("cpu-core"), path)
    return path


def run_of(tmp_path: Path, spec: JobSpec, slower: float = 1.0, **changes: Any) -> RunDir:
    """A run whose passes took so many times what is predicted of them; how late its last rank was is not known."""
    run = RunDir(str(tmp_path / "run"))
    run.create()
    machine = load("cpu-core").machine(spec.train.precision)
    time = predict(demand_of(spec), resolve(spec).shape, LAYOUT, machine).time
    parts = {
        "forward": slower * time.compute / 3,
        "backward": slower * time.compute * 2 / 3,
        "communication": time.communication + time.stragglers,
        "optimizer": time.optimizer,
    }
    summary = {"step_parts": parts, "step": FEWEST, "layouts": [str(LAYOUT)], "machine": this_machine()}
    run.write_json("summary.json", summary | changes)
    run.write_json("plan.json", {"chosen": LAYOUT.to_json() | {"text": str(LAYOUT)}})
    return run


def write_rows(run: RunDir, delay: float, attempts: tuple[int, ...] = (1,)) -> None:
    """Steps of 0.1 s and more, exponentially."""
    drawn = np.random.default_rng(3).exponential(0.1 * delay, size=400)
    rows = [
        {
            "step": n,
            "attempt": attempt,
            "time": 1.7e9 + n,
            "step_seconds": 0.2 + late,
            "forward_seconds": 0.04,
            "backward_seconds": 0.06 + late,
        }
        for attempt in attempts
        for n, late in enumerate(drawn, 1)
    ]
    rows[0]["forward_seconds"] = 9.0
    run.append("metrics.jsonl", rows)


def refine_by(spec: JobSpec, run: RunDir, path: Path) -> Profile:
    """The profile that a run of the job refines."""
    return refine(demand_of(spec), lambda: resolve(spec).shape, run, path)


def changed(profile: Profile) -> dict[str, float]:
    return {c.figure: c.after / c.before for entry in profile.refined for c in entry.changes}


def test_a_run_as_predicted_changes_nothing(tmp_path: Path, spec: JobSpec, profile: Path) -> None:
    found = refine_by(spec, run_of(tmp_path, spec), profile)
    assert changed(found) == pytest.approx(dict.fromkeys(changed(found), 1.0))
    assert found.refined[0].run == str(tmp_path / "run")


def test_a_slower_run_makes_later_plans_slower_and_is_taken_back(
    tmp_path: Path, spec: JobSpec, profile: Path
) -> None:
    before = read(profile)
    run = run_of(tmp_path, spec, slower=1.44)
    found = refine_by(spec, run, profile)
    assert changed(found)["peak.fp32"] == pytest.approx(1 / 1.2)
    store(found, profile)
    assert read(profile) == found
    with pytest.raises(InputError, match="already"):
        refine_by(spec, run, profile)
    store(undo(profile), profile)
    assert read(profile) == before
    with pytest.raises(InputError, match="no run has refined it"):
        undo(profile)


def test_who_has_no_name_is_told_by_number(
    tmp_path: Path, spec: JobSpec, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert refine_by(spec, run_of(tmp_path, spec), profile).refined[0].by == str(os.getuid())


def test_how_late_a_rank_is_is_read_off_the_rows(tmp_path: Path, spec: JobSpec, profile: Path) -> None:
    run, before = run_of(tmp_path, spec), load("cpu-core").delay.value
    write_rows(run, 1.44 * before)
    assert changed(refine_by(spec, run, profile))["delay.value"] == pytest.approx(1.2, rel=0.05)


def test_few_steps_say_nothing_of_how_late_a_rank_is() -> None:
    row = {"attempt": 2, "forward_seconds": 0.1, "backward_seconds": 0.2}
    assert delay_of([row] * FEWEST) == pytest.approx(0.0)
    assert delay_of([*[row] * (FEWEST - 2), {**row, "attempt": 1, "forward_seconds": 9.0}]) == 0.0
    assert delay_of([]) == delay_of([{"attempt": 1}] * 100) == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": FEWEST - 1}, "steps"),
        ({"step_parts": {}}, "has not measured"),
        ({"layouts": ["one", "two"]}, "several layouts"),
        ({"machine": {}}, "does not say"),
        ({"machine": {**this_machine(), "processor": "another"}}, "ran on .* another, but this machine"),
        ({"machine": {**this_machine(), "cores": 4096}}, "ran on 4096 x"),
    ],
)
def test_a_run_that_says_little_is_refused(
    tmp_path: Path, spec: JobSpec, profile: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        refine_by(spec, run_of(tmp_path, spec, **changes), profile)


def test_there_is_a_profile_first(tmp_path: Path, spec: JobSpec) -> None:
    with pytest.raises(InputError, match="no profile yet"):
        refine_by(spec, run_of(tmp_path, spec), tmp_path / "none.yaml")


@pytest.mark.parametrize("figure", ["peak.nothing", "nothing", "memory.value.deeper", "element_share.value"])
def test_a_damaged_record_cannot_be_taken_back(
    tmp_path: Path, spec: JobSpec, profile: Path, figure: str
) -> None:
    found = refine_by(spec, run_of(tmp_path, spec, slower=1.44), profile)
    (last,) = found.refined
    changes = (last.changes[0].model_copy(update={"figure": figure, "before": -1.0}),)
    store(found.model_copy(update={"refined": (last.model_copy(update={"changes": changes}),)}), profile)
    text = profile.read_text()
    with pytest.raises(InputError, match=rf"{figure} was -1, which it cannot have been"):
        undo(profile)
    assert profile.read_text() == text

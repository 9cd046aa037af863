"""A run that began in a precision that was chosen keeps it, and nothing that plans or begins one forgets to ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text

from orchestrator.checkpoint.identity import check_same_run, differences
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.controller.run_history import RunHistory
from orchestrator.launch import preflight as checks
from orchestrator.launch.job_checks import JobChecks
from orchestrator.launch.preflight import preflight
from orchestrator.observe.pages.report import report
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.resolve.precision import as_its_run, choice_of, in_chosen_precision, record_choice
from orchestrator.resolve.resolved_job import resolve
from orchestrator.storage.run_directory import PRECISION, RunDir
from orchestrator.train.config import Precision


def spec(precision: str = "auto", text: str = "a.txt") -> JobSpec:
    return parse(job(text, precision=precision))


def core(_: ResourceSpec, precision: Precision) -> Machine:
    return load("cpu-core").machine(precision)


def refuse(*_: object) -> Machine:
    raise AssertionError("nothing is to be chosen")


def test_a_job_that_names_one_is_left_alone(tmp_path: Path) -> None:
    named = resolve(spec("bf16"))
    assert in_chosen_precision(named, refuse) is named
    assert as_its_run(named.spec.train, RunDir(str(tmp_path))) is named.spec.train
    assert choice_of(named.spec.train, named) is None


def test_an_open_one_is_chosen_once_and_told() -> None:
    asked = resolve(spec())
    found = in_chosen_precision(asked, core)
    assert found.spec == spec(found.spec.train.dtype)
    assert found.precision is not None
    assert found.precision == choice_of(asked.spec.train, found)
    assert in_chosen_precision(found, refuse) is found


def test_why_is_kept_with_the_run_and_shown(tmp_path: Path) -> None:
    run, found = RunDir(str(tmp_path)), in_chosen_precision(resolve(spec()), core)
    run.write_text("job.yaml", dump(found.spec))
    record_choice(resolve(spec("bf16")), run)
    assert run.read_json(PRECISION) is None
    assert "Precision" not in report(run)
    record_choice(found, run)
    assert run.read_json(PRECISION)["why"] == str(found.precision)
    assert f"Precision {found.precision}" in report(run)


def test_what_keeps_why_may_be_there_before_the_run_writes(tmp_path: Path) -> None:
    """Whoever starts a run's controller writes it, at once."""
    run = RunDir(str(tmp_path / "run"))
    run.create()
    record_choice(in_chosen_precision(resolve(spec()), core), run)
    run.check_ours()


@pytest.mark.parametrize("before", ["fp32", "bf16", "fp16"])
def test_a_run_keeps_what_it_began_with(tmp_path: Path, before: Any) -> None:
    run = RunDir(str(tmp_path))
    assert as_its_run(spec().train, run).precision == "auto"
    run.write_text("job.yaml", dump(spec(before)))
    kept = spec().with_parts(train=as_its_run(spec().train, run))
    assert kept == spec(before)
    assert check_same_run(spec().run_identity, run) is check_same_run(kept.run_identity, run) is None
    assert str(choice_of(spec().train, resolve(kept))) == f"{before}, which the run started with"
    other = "bf16" if before == "fp32" else "fp32"
    with pytest.raises(InputError, match=f"train.precision is '{before}' in this run and '{other}'"):
        check_same_run(spec(other).run_identity, run)


def test_a_file_that_leaves_it_open_has_begun_nothing(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    run.write_text("job.yaml", dump(spec()))
    assert as_its_run(spec().train, run) == spec().train
    assert check_same_run(spec("bf16").run_identity, run) is None
    run.write_text("job.yaml", "name: [")
    with pytest.raises(InputError):
        as_its_run(spec().train, run)


def test_open_is_no_difference_and_another_one_is() -> None:
    assert (
        differences(spec().identity(), spec("bf16").identity())
        == differences(spec("bf16").identity(), spec().identity())
        == []
    )
    assert differences(spec("fp32").identity(), spec("bf16").identity()) == [
        ("train.precision", "bf16", "fp32")
    ]
    longer = parse(job("a.txt", precision="auto", z_loss=1e-4))
    assert [key for key, _, _ in differences(longer.identity(), spec("bf16").identity())] == ["train.z_loss"]


def test_what_is_checked_before_a_run_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(text=write_text(tmp_path, 20_000))
    run = RunDir(str(tmp_path / "run"))
    found = preflight(asked, run, None, None)
    assert found.spec.train.dtype == found.spec.train.precision != "auto"
    run.create()
    run.append("events.jsonl", [{"phase": "prepare"}])
    run.write_text("job.yaml", dump(parse(job(asked.data.sources[0].uri, precision="fp16"))))
    monkeypatch.setattr(checks, "worker_at", lambda address: refuse)
    assert preflight(asked, run, None, None).spec.train.dtype == "fp16"


def test_no_run_begins_in_a_precision_that_nobody_has_chosen(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path / "run"))
    run.create()
    with pytest.raises(RuntimeError, match="auto has not been replaced"):
        RunHistory(spec(), run)
    assert list((tmp_path / "run").iterdir()) == []


def test_data_is_prepared_of_a_job_that_leaves_it_open(tmp_path: Path) -> None:
    JobChecks(spec(text=write_text(tmp_path, 20_000))).without_model()

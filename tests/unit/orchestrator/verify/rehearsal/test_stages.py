"""What a rehearsal says of its stages: what fails, with the mend, and what is not reached then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import job, write_text

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.launch.job_checks import check_job
from orchestrator.verify.rehearsal import stages
from orchestrator.verify.rehearsal.full_size import plan_at_full_size
from orchestrator.verify.rehearsal.stages import Failed, LeftOut, Rehearsal, Scene, Stage


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rehearsal]:
    """A rehearsal whose stages do what is given, by their names, or nothing."""
    resolved, real = plan_at_full_size(check_job(parse(job(write_text(tmp_path, 20_000)))), None)

    def run(**acts: Exception) -> Rehearsal:
        def act(name: str) -> Callable[[Scene], str]:
            def do(scene: Scene) -> str:
                if error := acts.get(name.replace(" ", "_")):
                    raise error
                return "done"

            return do

        replaced = [(name, needs, act(name)) for name, needs, _ in stages.STAGES]
        monkeypatch.setattr(stages, "STAGES", replaced)
        monkeypatch.setattr(stages, "_full_size", act("real size"))
        return stages.rehearse(resolved, real, 0.1, lambda news: None)

    return run


def by_name(found: Rehearsal) -> dict[str, Stage]:
    return {stage.name: stage for stage in found.stages}


def test_all_stages_are_tried_in_order(rehearsed: Callable[..., Rehearsal]) -> None:
    found = rehearsed()
    assert [stage.name for stage in found.stages] == [
        "check",
        *(name for name, *_ in stages.STAGES),
        "real size",
    ]
    assert found.passed
    assert found.to_json()["passed"]
    assert {stage.verdict for stage in found.stages} == {"passed"}


def test_wrong_data_is_told_with_its_mend_and_nothing_that_needs_it_is_reached(
    rehearsed: Callable[..., Rehearsal],
) -> None:
    found = rehearsed(data=InputError("is not JSON", "a.jsonl, byte 7", "mend the line"))
    assert not found.passed
    told = by_name(found)
    assert told["data"].verdict == "failed"
    assert told["data"].done == "a.jsonl, byte 7: is not JSON"
    assert told["data"].mend == "mend the line"
    assert {told[name].verdict for name in ("steps", "kill", "reload", "export")} == {"not reached"}
    assert told["real size"].verdict == "passed"


def test_an_export_that_cannot_be_stops_nothing_else(rehearsed: Callable[..., Rehearsal]) -> None:
    told = by_name(found := rehearsed(export=RuntimeError("transformers\ndisagrees")))
    assert told["export"].verdict == "failed"
    assert told["export"].done == "RuntimeError: transformers disagrees"
    assert "checkpoint.export" in told["export"].mend
    assert told["generate"].verdict == "passed"
    assert not found.passed


def test_a_layout_that_cannot_load_says_what_to_pin(rehearsed: Callable[..., Rehearsal]) -> None:
    told = by_name(rehearsed(reload=Failed("step 5 was not made")))
    assert told["reload"].verdict == "failed"
    assert "pin parallel" in told["reload"].mend
    assert told["evaluate"].verdict == "passed"


def test_what_a_job_does_not_ask_for_is_left_out(rehearsed: Callable[..., Rehearsal]) -> None:
    found = rehearsed(evaluate=LeftOut("the job evaluates nothing"))
    assert by_name(found)["evaluate"].verdict == "left out"
    assert found.passed


@pytest.mark.parametrize(
    ("model", "fits"), [pytest.param("gpt-tiny", True, marks=pytest.mark.slow), ("gpt2-xl", False)]
)
def test_a_job_that_cannot_fit_says_so(tmp_path: Path, model: str, fits: bool) -> None:
    """The real size is traced and compared with what the device has."""
    document = job(write_text(tmp_path, 20_000), global_batch=2)
    document |= {"workload": {"model": model}, "parallel": {"zero": 0}, "resources": {"workers": 2}}
    resolved, real = plan_at_full_size(check_job(parse(document)), "t4")
    said, problem, mend = real.traced_text(resolved)
    assert bool(problem) != fits
    assert "worker offers" in said + problem
    assert ("zero" in mend) != fits

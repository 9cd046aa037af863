"""Machines are rendered for no job that could run on none of them; what is on the machines alone is left to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.extensions.render.model import check_could_run, resolved_here
from orchestrator.launch.offline_checks import check_on_paper

WORKERS = {"workers": {"min": 7, "max": 14}, "per_worker": {"gpu": 1}}


def asked(**more: Any) -> JobSpec:
    return parse(job("s3://b/*.txt") | {"workload": {"model": "llama-3-8b"}, "resources": WORKERS} | more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"workload": {"model": "llama3-8b"}}, "unknown model 'llama3-8b'; nearest are llama-3-8b"),
        ({"workload": {"model": "llama-3-8b", "changes": {"heads": 5}}}, "workload"),
        ({"workload": {"model": "bert-base"}}, "causal_lm does not train bert-base"),
        ({"parallel": {"tp": 7}}, "parallel: tp 7 does not divide the model's 32 attention heads; choose tp from"),
        ({"parallel": {"pp": 7, "schedule": "1f1b", "zero": 2}, "train": {"steps": 1, "global_batch": 1}}, "parallel"),
    ],
)  # fmt: skip
def test_a_job_that_could_run_nowhere_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as refused:
        check_could_run(asked(**more))
    assert says in str(refused.value)


def test_it_is_refused_as_a_plan_for_machines_that_are_not_here_refuses_it() -> None:
    spec = asked(workload={"model": "llama3-8b"})
    with pytest.raises(InputError) as by_plan:
        check_on_paper(spec)
    with pytest.raises(InputError) as by_render:
        check_could_run(spec)
    assert str(by_render.value) == str(by_plan.value)


def test_a_folder_that_is_here_is_read_and_one_that_is_not_is_left_to_the_machines(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match=r"config\.json"):
        check_could_run(asked(workload={"model": f"hf:{tmp_path}/model"}))
    there = asked(workload={"model": f"hf:{tmp_path}/nowhere"}, parallel={"tp": 7})
    check_could_run(there)
    assert isinstance(resolved_here(there), InputError)


@pytest.mark.parametrize(
    "more",
    [
        {"workload": {"model": "code_of_the_image:Model"}, "resources": {"workers": 1}},
        {"workload": {"model": "llama-3-8b", "objective": "code_of_the_image:Loss"}},
        {"parallel": {"cost": "code_of_the_image:cost"}},
    ],
)
def test_code_of_the_user_s_may_be_in_the_image_alone(more: dict[str, Any]) -> None:
    check_could_run(asked(**more))


def test_a_job_that_could_run_is_resolved() -> None:
    spec = asked(parallel={"tp": 8}, resources={"workers": 8, "per_worker": {"gpu": 1}})
    check_could_run(spec)
    job = resolved_here(spec)
    assert not isinstance(job, InputError)
    assert job.shape.layers == 32

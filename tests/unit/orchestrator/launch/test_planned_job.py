"""A job is planned as it is asked for: with so many workers, for machines that are not here."""

from __future__ import annotations

from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.planned_job import planned_on_paper
from orchestrator.planner.planner import with_workers


def job(parallel: object = "auto") -> JobSpec:
    document = {
        "name": "paper",
        "workload": {"model": "gpt-tiny", "changes": {"layers": 2}},
        "data": {"sources": [{"uri": "nowhere/*.txt"}], "tokenizer": "nowhere", "sequence_length": 32},
        "train": {"steps": 10, "global_batch": 8, "precision": "auto"},
        "parallel": parallel,
        "resources": {"workers": {"min": 2, "max": 4}, "per_worker": {"gpu": 1}},
    }
    return parse(document)


def test_so_many_workers_are_taken_whatever_the_job_would_take() -> None:
    assert with_workers(job().resources, 1).workers.model_dump() == {"min": 1, "max": 1}
    assert with_workers(job().resources, 16).workers.model_dump() == {"min": 2, "max": 16}


def test_what_is_taken_of_what_is_not_here_and_why_the_precision_are_told() -> None:
    found = planned_on_paper(job({"tp": 2, "zero": 1, "micro_batch": 1}), "h100")
    told = found.to_json()
    assert (found.on_cpu, found.refused, told["memory"]["source"]) == (False, "", "trace")
    assert told["assumed"] == list(found.assumed)
    assert "the tokenizer nowhere is not here" in told["assumed"][0]
    assert told["precision"]["chosen"] == found.job.spec.train.dtype
    assert not found.must_fit  # the layout is given by hand


def test_without_a_trace_the_formula_gives_the_memory() -> None:
    found = planned_on_paper(job({"tp": 2, "zero": 1, "micro_batch": 1}), "h100", trace=False)
    told = found.to_json()
    assert told["memory"]["source"] == "formula"
    assert told["memory"]["not_traced"] == ["no trace was asked for"]
    assert told["predicted"] == found.plan.to_json()["predicted"]

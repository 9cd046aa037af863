"""What is checked of a job that is planned for machines that are not here, where its text and its tokenizer need not be
either."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.config.tokenizer_training import TrainBpe
from orchestrator.launch.preflight import (
    check_cleaning,
    check_objective,
    check_preferences,
    check_records,
    check_workload,
)
from orchestrator.planner import prices
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input


def check_on_paper(spec: JobSpec) -> tuple[ResolvedJob, list[str]]:
    """The job, resolved, and what is assumed of it, a line each. Raises InputError for what is wrong with it wherever
    it runs, but for its text, and for a vocabulary that nothing tells."""
    problems = Problems()
    assumed: list[str] = []
    for check in (check_records, check_preferences, check_cleaning, prices.check):
        with problems.noted():
            check(spec)
    with problems.noted():
        spec, assumed = with_vocabulary(spec)
        job = resolve(spec)
        with problems.noted():
            check_objective(job)
            if not problems:
                check_workload(job)
    problems.raise_noted()
    return job, assumed


def with_vocabulary(
    spec: JobSpec, is_there: Callable[[str], bool] | None = None
) -> tuple[JobSpec, list[str]]:
    """The job with a tokenizer of as many tokens as its model has where that which it names is not here, and a line
    that says so; `is_there` tells, by default as the run would look for it. Raises InputError where the model has no
    number of its own either."""
    from orchestrator.data.encoding import tokenizer
    from workloads.describe import describe
    from workloads.own.object_reference import is_object_reference

    named, asked = spec.data.tokenizer, spec.workload
    if spec.data.samples is not None or not isinstance(named, str) or (is_there or tokenizer.is_there)(named):
        return spec, []
    if is_object_reference(asked.model):  # its size is what it is given
        hint = "write data.tokenizer: {train_bpe: N} with the size of its vocabulary"
        raise InputError("is not here, and an own model has as many tokens", f"data.tokenizer {named}", hint)
    with wrong_input("workload.model"):
        size = describe(asked.model, asked.changes, implementation=asked.implementation).vocab_size
    size += len(spec.data.add_tokens)
    data = spec.data.model_copy(update={"tokenizer": TrainBpe(train_bpe=max(size, 300)), "add_tokens": []})
    line = f"the tokenizer {named} is not here, and taken to have the {size:,} tokens of {asked.model}"
    return spec.model_copy(update={"data": data}), [line]

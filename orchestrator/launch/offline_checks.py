"""Check a job that is planned for other machines. Its text and its tokenizer need not exist on this one."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainBpe
from orchestrator.launch.component_checks import ComponentChecks
from orchestrator.launch.job_checks import check_objective_of, check_workload
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input


def check_on_paper(spec: JobSpec) -> tuple[ResolvedJob, list[str]]:
    """Return the resolved job, and a line for each assumption about it.

    Raises InputError for everything that would be wrong on any machine except the text, and for an unknown vocabulary.
    """
    problems = Problems()
    assumed: list[str] = []
    for check in ComponentChecks(spec).without_text():
        with problems.noted():
            check()
    with problems.noted():
        data, assumed = with_vocabulary(spec.data, spec.workload)
        spec = spec.with_parts(data=data)
        job = resolve(spec)
        with problems.noted():
            check_objective_of(job)
            if not problems:
                check_workload(job)
    problems.raise_noted()
    return job, assumed


def with_vocabulary(
    data: DataSpec, workload: WorkloadSpec, is_there: Callable[[str], bool] | None = None
) -> tuple[DataSpec, list[str]]:
    """Replace a tokenizer that does not exist here by one with as many tokens as the model has.

    Args:
        data: the data, which names the tokenizer.
        workload: the model.
        is_there: returns whether a tokenizer exists, by default as the run looks for it.

    Returns:
        The data, and a line if the tokenizer was replaced.

    Raises:
        InputError: the size of the vocabulary does not follow from the model either.
    """
    from orchestrator.data.encoding import tokenizer
    from workloads.describe import describe
    from workloads.own.object_reference import is_object_reference

    named = data.tokenizer
    if data.samples is not None or not isinstance(named, str) or (is_there or tokenizer.is_there)(named):
        return data, []
    if is_object_reference(workload.model):  # its vocabulary is as large as the tokenizer
        hint = "write data.tokenizer: {train_bpe: N} with the size of its vocabulary"
        raise InputError(
            "is not here, but it determines the size of an own model", f"data.tokenizer {named}", hint
        )
    with wrong_input("workload.model"):
        size = describe(workload.model, workload.changes, implementation=workload.implementation).vocab_size
    size += len(data.add_tokens)
    data = data.model_copy(update={"tokenizer": TrainBpe(train_bpe=max(size, 300)), "add_tokens": []})
    line = f"the tokenizer {named} is not here, and taken to have the {size:,} tokens of {workload.model}"
    return data, [line]

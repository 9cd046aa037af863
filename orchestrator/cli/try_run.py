"""The options --dry-run and --smoke of the command run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.cli.options import emit
from orchestrator.cli.stage_notice import StageNotice
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.config.spec import JobSpec
    from orchestrator.parallel.layout import Layout
    from orchestrator.planner.choose_layout import Verdict
    from orchestrator.planner.demand import Demand
    from orchestrator.storage.run_directory import RunDir


def try_directory(run_dir: str | None) -> str | None:
    """The run directory of a try, next to that of the run."""
    from orchestrator.config.smoke import SUFFIX

    return f"{run_dir.rstrip('/')}{SUFFIX}" if run_dir else None


def smoke_of(spec: JobSpec) -> JobSpec:
    """The job of a try: the layout planned for this machine, except the micro-batch, and the precision that the job
    would have here."""
    from dataclasses import replace

    from orchestrator.config.smoke import smoke_of as small
    from orchestrator.launch.preflight import check_on_machine
    from orchestrator.launch.worker import local_worker
    from orchestrator.planner.demand import demand_of
    from orchestrator.planner.planner import planned
    from orchestrator.planner.trace.layout_memory import plan_with_traces
    from orchestrator.resolve.precision import in_chosen_precision
    from orchestrator.resolve.resolved_job import resolve

    def layout_of(demand: Demand) -> Layout | None:
        try:
            result = planned(demand, resolved.shape, workers, machine, verdicts=verdicts).chosen.layout
        except InputError:  # there is none: `preflight` says why
            return None
        return replace(result, micro_batch=1)

    try:
        resolved = in_chosen_precision(resolve(spec), local_worker)
    except InputError:
        check_on_machine(spec, None)  # tells all that is wrong, not the first thing alone
        raise
    spec = resolved.spec
    workers = spec.resources.workers.max
    machine = local_worker(spec.shared_resources, spec.train.dtype)
    verdicts: Mapping[Layout, Verdict] = {}
    with suppress(InputError):
        verdicts = plan_with_traces(resolved, workers, machine).verdicts
    wanted = layout_of(demand_of(spec))
    return small(spec, lambda job: layout_of(demand_of(job)) == wanted)


@contextmanager
def begun_anew(directory: RunDir) -> Iterator[None]:
    """The directory of a try without what an earlier one has left there, and without anything if the job is refused.

    Raises InputError if another run is there, or the earlier try is at work.
    """
    from orchestrator.storage.run_directory import SMOKE, remove_empty

    if directory.exists(SMOKE):
        with directory.lock():  # so that nobody begins there meanwhile
            directory.remove_all()
    elif directory.holds_a_run():
        raise InputError("this is a run, not an earlier try", directory.uri, "give another --run-dir")
    made = directory.create()
    directory.write_json(SMOKE, {})
    try:
        yield
    except InputError:
        if not directory.holds_a_run(ignored=SMOKE):
            directory.remove(SMOKE)
            remove_empty(made)
        raise


def dry_run_of(
    spec: JobSpec, directory: RunDir, until: int | None, address: str | None, as_json: bool
) -> None:
    """Run the checks of `run`, and show what it would do."""
    from orchestrator.checkpoint.identity import check_same_run
    from orchestrator.cli import plan_table
    from orchestrator.launch.finished import PastRun
    from orchestrator.launch.planned_job import planned_of
    from orchestrator.launch.preflight import preflight
    from orchestrator.launch.worker import worker_at
    from orchestrator.models.continued import continuation_of
    from orchestrator.planner.demand import demand_of
    from orchestrator.resolve.training_inputs import prepared_rows

    done = PastRun(spec, directory).done() is not None
    with StageNotice(as_json) as notice:
        notice.begin("reading the data and the model's configuration")
        checks_model = partial(notice.begin, "checking the model, the objective and the tokenizer")
        job = preflight(spec, directory, until, address, checks_model)
    source, commit = continuation_of(job.spec).begun_from(
        directory, check_same_run(job.spec.run_identity, directory)
    )
    machine = worker_at(address)(job.spec.shared_resources, job.spec.train.dtype) if address else None
    with StageNotice(as_json) as notice:
        notice.begin("tracing the memory of layouts")
        rows = prepared_rows(job.spec, directory, job.folder_config)
        chosen_plan = planned_of(spec.train, job.with_rows(rows), machine)
    begins = "does nothing: it is finished" if done else "starts from the beginning"
    if commit is not None and not done:
        begins = f"continues from step {commit.step}" + (f" of {source.uri}" if source else "")
    if as_json:
        emit(
            {
                "run_dir": directory.uri,
                "step": commit.step if commit else None,
                "done": done,
                **chosen_plan.traced.plan_json(chosen_plan.plan, chosen_plan.on_cpu),
                **({"precision": chosen_plan.choice.to_json()} if chosen_plan.choice else {}),
            }
        )
    else:
        plan_table.show(
            job.spec.workload.model,
            demand_of(job.spec),
            job.shape,
            chosen_plan.plan,
            data=job.spec.data,
            checkpoint=job.spec.checkpoint,
            traced=chosen_plan.traced,
        )
        plan_table.show_memory(chosen_plan.plan, chosen_plan.traced, chosen_plan.on_cpu)
        plan_table.show_precision(chosen_plan.choice)
        print(f"{directory.uri} {begins}; nothing was started or written")

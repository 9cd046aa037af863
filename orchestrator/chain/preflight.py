"""All checks of a chain before its first stage begins, including stages whose inputs do not exist yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.chain.base_to_come import check_to_come
from orchestrator.chain.exports import check_compress
from orchestrator.chain.same_inputs import check_inputs
from orchestrator.chain.stage_run import StageRun, export_of, stage_runs
from orchestrator.chain.stand_ins import stand_ins
from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.chain import CONTINUE, VOCABULARY, ChainSpec
from orchestrator.config.document import STAGES
from orchestrator.config.errors import InputError, Problems
from orchestrator.launch.init_checks import check_base, check_continues
from orchestrator.launch.job_checks import JobChecks, check_job
from orchestrator.launch.machine_checks import check_machine
from orchestrator.launch.path_checks import check_all_uris
from orchestrator.launch.worker import worker_at
from orchestrator.models.base import INIT
from orchestrator.models.continued import check_length, continuation_of
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.resolved_job import ResolvedJob, wrong_input
from orchestrator.storage.row_line import EVENTS, TRIALS
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local

if TYPE_CHECKING:
    from orchestrator.planner.choose_precision import MachineOf


def check_submitted_chain(chain: ChainSpec, root: RunDir, address: str | None) -> None:
    """Check a chain that a cluster will run, as its command there will. Starts and writes nothing.

    A chain that names anything that this machine lacks, or that is in a store, is left to that command.

    Args:
        chain: the chain.
        root: its directory.
        address: the cluster; None for the default one.

    Raises:
        InputError: with the problems of all stages.
    """
    from orchestrator.launch.submitted_job import SubmittedJob
    from orchestrator.planner.device import BOUNDLESS

    stages = stage_runs(chain, root)
    uris = [
        uri for stage in stages.values() for uri in (stage.job.data.cache, stage.job.checkpoint.export_to)
    ]
    if not all(map(is_local, filter(None, [root.uri, *uris]))):
        return
    made = tuple(folder for stage in stages.values() for folder in (stage.run.uri, export_of(stage)))
    if all(SubmittedJob(stage.job, made).is_here for stage in stages.values()):
        check_chain(chain, stages, root, address or "auto", lambda *_: BOUNDLESS)


def check_chain(
    chain: ChainSpec,
    stages: Mapping[str, StageRun],
    root: RunDir,
    address: str | None,
    machine_of: MachineOf | None = None,
) -> set[str]:
    """Check a chain completely without starting anything. Return the stages that are done.

    Args:
        chain: the chain.
        stages: its stages.
        root: its directory.
        address: the cluster, None for this machine.
        machine_of: returns a worker of a job; None to ask the cluster.

    Raises:
        InputError: with the problems of all stages.
    """
    machine_of = machine_of or worker_at(address)
    for name, what in ((TRIALS, "the folder of a search"), (EVENTS, "the directory of a run")):
        if root.rows(name):
            raise InputError(f"is {what}, not a chain", root.uri, "give another name or --run-dir")
    done: set[str] = set()
    resolved: dict[str, ResolvedJob] = {}
    problems = Problems()
    _check_exports_are_here(chain, root)
    check_compress(chain, stages)
    with stand_ins(chain, stages) as jobs:
        for name, stage in stages.items():
            with problems.noted(), of_stage(name):
                if check_inputs(stage, done):
                    done.add(name)
                    continue
                check_all_uris(stage.job, stage.run)
                check_machine(stage.job.resources, stage.job.all_workers, address)
                if stage.stage.vocabulary:
                    JobChecks(jobs[name]).without_model()
                    continue
                stage_job = jobs[name].with_parts(train=as_its_run(jobs[name].train, stage.run))
                teacher = stage.stage.learns_from
                if teacher is not None and teacher.stage not in done:
                    stage_job = stage_job.with_parts(distill=None)  # it is checked once it is there
                resolved[name] = check_job(stage_job, machine_of=machine_of)
                base = stage.stage.begins_with
                before = stage.stage.continues
                if before and before.stage in resolved and before.stage not in done:
                    where = stages[before.stage].run.uri
                    theirs = stages[before.stage].job
                    continuation_of(stage.job).check_keys(theirs.identity(), where)
                    step = int(before.tag) if before.tag.isdecimal() else theirs.train.steps
                    check_length(stage.job.train, stage.job.reading, step, where)
                    with wrong_input(CONTINUE):
                        check_to_come(resolved[before.stage], resolved[name], where)
                elif before and before.stage not in done:
                    pass  # that stage's own problem is reported
                elif base is None or base.stage in done:
                    commit = check_same_run(stage.job.run_identity, stage.run)
                    check_base(resolved[name], commit or check_continues(resolved[name], stage.run))
                elif base.stage in resolved:
                    with wrong_input(INIT):
                        check_to_come(resolved[base.stage], resolved[name], stages[base.stage].run.uri)
    problems.raise_noted()
    return done


def _check_exports_are_here(chain: ChainSpec, root: RunDir) -> None:
    """Check that exports are on the local file system, because a run can begin only with such an export."""
    for stage in chain.stages:
        if stage.vocabulary and not is_local(root.uri):
            problem = f"{stage.name} writes a folder, and the directory of the chain is in a store"
            raise InputError(problem, f"{STAGES}.{stage.name}.{VOCABULARY}", "give a local --run-dir")
        base = stage.begins_with and chain[stage.begins_with.stage]
        if not base or not base.job.workload.adapter:
            continue
        if not is_local(base.job.checkpoint.export_to or root.uri):
            problem = f"{base.name} trains an adapter and exports it to a store, but a run can begin only from a folder"
            hint = f"set checkpoint.export_to of {base.name} to a folder"
            raise InputError(problem, f"{STAGES}.{stage.name}.{INIT}", hint)


@contextlib.contextmanager
def of_stage(name: str) -> Iterator[None]:
    """Add the stage's name to the errors of this context."""
    try:
        yield
    except InputError as error:
        first, *others = (
            InputError(each.what, ": ".join(filter(None, (f"{STAGES}.{name}", each.where))), each.hint)
            for each in error.each()
        )
        raise InputError(first.what, first.where, first.hint, others) from None

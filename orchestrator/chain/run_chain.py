"""Drive a chain from a command: check its stages, connect to Ray, and drive them to the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import yaml

from orchestrator.chain.drive import ChainOutcome, Driver, Faults, Show, tell_of
from orchestrator.chain.preflight import check_chain
from orchestrator.chain.results import record
from orchestrator.chain.stage_run import StageRun, stage_runs
from orchestrator.config.chain import ChainSpec
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import holds_secret
from orchestrator.launch.active_controller import refuse_if_active
from orchestrator.launch.import_prefetch import imports_begun
from orchestrator.launch.machine_checks import local_gpus
from orchestrator.launch.own_sources import make_own_sources
from orchestrator.launch.submission import on_cluster
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import REPORT, RunDir, remove_empty


def run(
    chain: ChainSpec, root: RunDir, address: str | None, show: Show, faults: Faults, priority: int = 0
) -> ChainOutcome:
    """Drive a chain to its end, from the beginning or from where it is.

    Args:
        chain: the chain.
        root: its directory.
        address: the cluster to run on, None to start Ray on this machine.
        show: gets the status of the running stages, by name, several times a second.
        faults: faults to inject, for tests.
        priority: the priority in the cluster's queue; higher ones run first.

    Raises:
        InputError: one of the jobs is wrong, or belongs to another run. Nothing has been written in that case.
    """
    from orchestrator.chain.mlflow_chain import followed

    stages = stage_runs(chain, root)
    for name, stage in stages.items():
        tell = partial(tell_of, show, name)
        make_own_sources(stage.job.data, address, tell)
    done = check_chain(chain, stages, root, address)
    before = root.read_json_or_empty(CHAIN)
    driver = Driver(
        chain,
        stages,
        root,
        done,
        show=show,
        address=address,
        faults=faults,
        priority=priority,
    )
    is_over = done == set(stages) and driver.exports.are_good()
    if is_over and before.get("state") == Outcome.DONE and root.exists(REPORT):
        line = f"{root.uri} is finished: nothing to do"
        return ChainOutcome(Outcome.DONE, record(chain, stages, root), line)
    refuse_if_active(root, *(stage.run for stage in stages.values()))
    made = root.create()
    try:
        with root.lock():
            text = yaml.safe_dump(chain.document(), sort_keys=False)
            root.write_text("job.yaml", text, private=holds_secret(text))
            driver.record()
            if not is_over:
                with followed(chain, stages, root):
                    _drive(driver, stages, address)
            return driver.finish()
    finally:
        remove_empty([*made, *(stage.run.uri for stage in stages.values() if stage.run.local)])


def _drive(driver: Driver, stages: Mapping[str, StageRun], address: str | None) -> None:
    jobs = [stage.job for stage in stages.values()]
    cpus = max(each.all_workers.max * each.resources.per_worker.cpu for each in jobs)
    with_gpu = [each for each in jobs if each.resources.per_worker.gpu]
    gpus = max((local_gpus(each.all_workers) for each in with_gpu), default=0) if address is None else 0
    first = jobs[0]
    with imports_begun(first.parallel, first.workload.model, embedded=address is None) as shared:
        for _ in range(3):
            with on_cluster(address, cpus, gpus):
                if not driver.drive(shared):
                    return

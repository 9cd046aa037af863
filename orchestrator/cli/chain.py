"""Chains in the commands run, submit, plan, status, stop and report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from orchestrator.cli.options import at_its_end, emit, table
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.config.chain import ChainSpec
    from orchestrator.config.spec import JobSpec
    from orchestrator.storage.run_directory import RunDir


def run_chain(
    chain: ChainSpec, root: RunDir, address: str | None, faults: list[str], priority: int, as_json: bool
) -> None:
    """Run a chain to its end, from its start or from where it stopped."""
    from orchestrator.chain.console import ChainDisplay
    from orchestrator.chain.run_chain import run

    injected: dict[str, tuple[str, ...]] = {}
    for text in faults:
        stage, _, fault = text.partition(":")
        injected[stage] = (*injected.get(stage, ()), fault)
    with ChainDisplay() as progress:
        result = run(chain, root, address=address, show=progress.update, faults=injected, priority=priority)
    with at_its_end():
        if as_json:
            emit(
                {
                    "exit_code": result.outcome.exit_code,
                    "run_dir": root.uri,
                    "line": result.line,
                    "chain": result.summary,
                }
            )
        else:
            show(result.summary)
            for problem in filter(None, (result.summary.get("problem"), result.summary.get("tracking"))):
                print(f"orchestrator: {problem}", file=sys.stderr)
            print(f"report.html and chain.json are in {root.uri}", file=sys.stderr)
            if result.line:
                print(f"orchestrator: {result.line}", file=sys.stderr)
    raise typer.Exit(result.outcome.exit_code)


def check(chain: ChainSpec, root: RunDir, address: str | None, as_json: bool) -> None:
    """Check a chain and show what `run` would do. Start and write nothing."""
    from orchestrator.chain.preflight import check_chain
    from orchestrator.chain.stage_run import stage_runs

    stages = stage_runs(chain, root)
    done = check_chain(chain, stages, root, address)
    if as_json:
        needs = {stage.name: list(stage.needs) for stage in chain.stages}
        emit({"run_dir": root.uri, "done": [name for name in stages if name in done], "stages": needs})
        return
    for name, stage in stages.items():
        after = f" after {', '.join(stage.stage.needs)}" if stage.stage.needs else ""
        print(f"{name}: {'done' if name in done else f'to be run{after}'}, {stage.run.uri}")
    print("nothing was started or written")


def plan_chain(chain: ChainSpec, root: RunDir, plan: Callable[[JobSpec], Any], as_json: bool) -> None:
    """Plan every stage. A tokenizer that an earlier stage will train counts with its requested size."""
    from orchestrator.chain.preflight import of_stage
    from orchestrator.chain.stage_run import stage_runs
    from orchestrator.chain.stand_ins import stand_ins

    plans = {}
    with stand_ins(chain, stage_runs(chain, root)) as jobs:
        for name, job in jobs.items():
            if chain[name].vocabulary:  # it trains nothing
                continue
            with of_stage(name):
                if not as_json:
                    print(f"\n{name}")
                plans[name] = plan(job)
    if as_json:
        emit(plans)


def chain_at(target: str) -> tuple[RunDir, ChainSpec] | None:
    """The directory of a chain and its job; None if no chain is at that place."""
    from orchestrator.api.place import place_of
    from orchestrator.config.chain import parse_chain
    from orchestrator.config.document import STAGES, parse_yaml
    from orchestrator.storage.file_names import CHAIN
    from orchestrator.storage.run_directory import RunDir

    try:
        root = RunDir(place_of(target))
        text = root.read_text("job.yaml") if root.exists(CHAIN) else None
    except (InputError, OSError):
        return None
    if text is None:
        return None
    document = parse_yaml(text, root.at("job.yaml"))
    return (root, parse_chain(document, root.at("job.yaml"))) if STAGES in document else None


def refuse_chain(target: str) -> None:
    """Raise InputError if a chain is at that place. For commands that take one run only."""
    if (chain := chain_at(target)) is not None:
        names = ", ".join(stage.name for stage in chain[1].stages)
        raise InputError("is a chain", chain[0].uri, f"name the folder of a stage in it: {names}")


def progress_of(root: RunDir, chain: ChainSpec) -> dict[str, Any]:
    """The progress of a chain, read from the run directories of its stages."""
    from orchestrator.chain.results import record
    from orchestrator.chain.stage_run import stage_runs

    return record(chain, stage_runs(chain, root), root)


def show_status(root: RunDir, chain: ChainSpec, as_json: bool) -> None:
    """Print the stages of a chain, each with its state."""
    summary = progress_of(root, chain)
    if as_json:
        emit(summary)
    else:
        show(summary)


def show(summary: dict[str, Any]) -> None:
    """Print the stages as a table, and the exports that were measured as another."""
    from orchestrator.chain.console import COLUMNS, rows
    from orchestrator.cli.bench import show_exports

    table(f"{summary['name']}: {summary['state']}", COLUMNS, rows(summary))
    if summary["exports"]:
        show_exports(summary["exports"])


def write_report(root: RunDir, chain: ChainSpec) -> None:
    """Write chain.json and report.html again, and send missing rows to MLflow."""
    from orchestrator.chain.results import finish
    from orchestrator.chain.stage_run import stage_runs

    stages = stage_runs(chain, root)
    summary = finish(chain, stages, root, progress_of(root, chain))
    print(root.at("report.html"))
    for problem in filter(None, (summary["problem"], summary["tracking"])):
        print(f"orchestrator: {problem}", file=sys.stderr)


def stop_stages(root: RunDir, chain: ChainSpec, stop: Callable[[RunDir], None], as_json: bool) -> None:
    """Ask all running stages to save a checkpoint and end. No further stage starts."""
    from orchestrator.chain.results import WAITING
    from orchestrator.config.outcome import ENDED
    from orchestrator.observe.last_status import LOST

    summary = progress_of(root, chain)
    working = [stage for stage in summary["stages"] if stage["state"] not in (*ENDED, WAITING, LOST)]
    if not working:
        raise InputError("no stage of this chain is running", root.uri, "see `orchestrator status`")
    for stage in working:
        stop(_run(stage["run_dir"]))
    names = [stage["stage"] for stage in working]
    if as_json:
        emit({"name": chain.name, "run_dir": root.uri, "state": "stopping", "stages": names})
    else:
        print(f"{', '.join(names)} of {root.uri} will commit and end")


def _run(uri: str) -> RunDir:
    from orchestrator.storage.run_directory import RunDir

    return RunDir(uri)

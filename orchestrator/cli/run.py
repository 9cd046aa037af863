"""The commands run, status and stop."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.workers.clock import process_age, wall
from orchestrator.cli.chain import chain_at, check, run_chain, show_status, stop_stages
from orchestrator.cli.options import (
    Address,
    Cluster,
    Job,
    Json,
    Priority,
    Progress,
    RunDirectory,
    Seeds,
    Set,
    at_its_end,
    emit,
    existing_run,
    jobs_of,
    run_of,
)
from orchestrator.cli.targets import Target, before_status, has_commit, job_at, job_named, run_at, shown_of
from orchestrator.cli.try_run import begun_anew, dry_run_of, smoke_of, try_directory
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED, Outcome

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Jobs, Submission
    from orchestrator.storage.run_directory import RunDir

LONGEST_START = 600.0
"""Most seconds for starting Python and reading the job file. More means that the system clock was changed."""
ANSWER = 120.0
"""Seconds for a controller to receive a stop: it may be starting on a busy machine."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(run)
    app.command()(status)
    app.command()(stop)


def run(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="end at this step with a checkpoint; exit code 3")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND@RANK:STEP", help="inject a fault, to test recovery", hidden=True),
    ] = None,
    priority: Priority = 0,
    progress: Progress = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check everything and show the plan, but start and write nothing"),
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="try the job in a few small steps, in a separate run directory that each try empties",
        ),
    ] = False,
    lr_range: Annotated[
        str | None,
        typer.Option(
            "--lr-range",
            metavar="LOW:HIGH[:STEPS]",
            help="raise the learning rate over 100 steps in a separate run directory, and suggest one",
        ),
    ] = None,
    seeds: Seeds = None,
    as_json: Json = False,
) -> None:
    """Train a job or a chain to its end. Resume it from its last checkpoint if it has one."""
    from orchestrator.config.chain import ChainSpec
    from orchestrator.launch.start_run import run as drive
    from orchestrator.observe.console import ProgressDisplay, final_table

    spec = jobs_of(job, overrides, seeds)
    if lr_range is not None:
        from orchestrator.cli.lr_range import refuse_other_runs, run_lr_range

        options = {
            "--until": until,
            "--smoke": smoke,
            "--dry-run": dry_run,
            "--seeds": seeds,
            "--fault": fault,
        }
        refuse_other_runs({name: value not in (None, False) for name, value in options.items()})
    if isinstance(spec, ChainSpec):
        if until is not None or smoke or lr_range:
            option = "--until" if until is not None else "--smoke" if smoke else "--lr-range"
            raise InputError("needs one run, but this is a chain of runs", option, "leave it out")
        directory = run_of(spec.name, run_dir)
        if dry_run:
            check(spec, directory, address, as_json)
            return
        run_chain(spec, directory, address=address, faults=fault or [], priority=priority, as_json=as_json)
        return
    if lr_range is not None:
        raise typer.Exit(
            run_lr_range(
                spec.document(),
                lr_range,
                run_dir,
                address,
                priority=priority,
                how=progress,
                as_json=as_json,
            ).exit_code
        )
    if smoke:
        spec = smoke_of(spec)
    directory = run_of(spec.name, try_directory(run_dir) if smoke else run_dir)
    faults = _faults(fault or [])
    if dry_run:
        dry_run_of(spec, directory, until, address, as_json)
        return
    anew = begun_anew(directory) if smoke else contextlib.nullcontext()
    with anew, ProgressDisplay(how=progress) as display:
        outcome = drive(
            spec,
            directory,
            until=until,
            address=address,
            show=display.update,
            faults=faults,
            priority=priority,
            launched=_launched(),
        )
    with at_its_end():
        if as_json:
            emit(
                {
                    "exit_code": outcome.outcome.exit_code,
                    "run_dir": directory.uri,
                    "line": outcome.line,
                    "summary": outcome.summary,
                }
            )
        elif outcome.summary:
            final_table(outcome.summary)
            tracking = spec.tracking.uri if spec.tracking else None
            _where_next(directory.uri, tracking, spec.checkpoint.export, outcome.summary)
        if outcome.outcome == Outcome.FAILED and not as_json:
            _printed_last(outcome.summary or {})
        if outcome.line and not as_json:
            print(f"orchestrator: {outcome.line}", file=sys.stderr)
    raise typer.Exit(outcome.outcome.exit_code)


def status(target: Target, address: Cluster = None, as_json: Json = False) -> None:
    """Show phase, step, attempt, layout and ranks of a run, here or on a cluster. Show the stages of a chain."""
    if (chain := None if address else chain_at(target)) is not None:
        show_status(*chain, as_json)
        return
    local = None if address else run_at(target)
    named = job_named(target, address) if local else job_at(target, address)
    job = named[1] if named else None
    other = ""
    if job is not None and local is not None and job.run_dir != local.uri:  # two runs of one name
        if job.has_ended or not _is_over(local):  # as `stop` chooses
            other = f"{job.id} is another run: {job.state}, run directory {job.run_dir}"
            job = None
        else:
            other = f"{local.uri} is another run"
            local = None
    if job is not None and (chain := chain_at(job.run_dir)) is not None:
        show_status(*chain, as_json)
        return
    directory = local or run_at(job.run_dir if job else "")
    if directory is None:
        assert job is not None
        status_json: dict[str, Any] = {
            "name": job.name,
            "phase": job.state,
            "ranks": [],
            "note": before_status(job),
            "state": job.state,
        }
    else:
        status_json = _status_of(directory)
    if job is not None:
        status_json |= {"job": shown_of(job)}
    if as_json:
        emit(status_json)
    else:
        _print_status(status_json, job, directory is not None)
        print(other, end="\n" if other else "")
    if directory is not None:
        _end_in_mlflow(directory, as_json)


def _print_status(status: dict[str, Any], job: Submission | None, has_run: bool) -> None:
    if job is not None:
        print(f"{job.id}: {status['job']['state']}, run directory {job.run_dir}")
        # A status that is older than the submission is of an earlier one.
        is_earlier = not has_run or job.came_after(status.get("time"))
        if is_earlier and job.state not in (Outcome.DONE, Outcome.STOPPED) and (says := before_status(job)):
            print(says)
    if has_run:
        _show_status(status)


def _end_in_mlflow(directory: RunDir, as_json: bool) -> None:
    """Tell MLflow of a run that no controller drives any more; see `end_dead_run`."""
    from orchestrator.observe.last_status import LOST, last_status

    if last_status(directory).get("phase") != LOST:  # the next import takes a moment
        return
    from orchestrator.observe.mlflow_dead_runs import end_dead_run

    line = end_dead_run(directory)
    if line and not as_json:
        print(line)


def stop(
    target: Target,
    address: Cluster = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait for its last checkpoint and its end")
    ] = True,
    as_json: Json = False,
) -> None:
    """Ask a run to save a checkpoint and end, wherever it trains, as Ctrl-C in its terminal does."""
    chain = chain_at(target)
    local = chain[0] if chain else run_at(target)
    jobs: Jobs | None = None
    job: Submission | None = None
    try:
        jobs, job = job_at(local.uri if local else target, address)
    except InputError:
        if local is None:  # it was not submitted; its controller may be on a Ray without a Jobs API
            raise
    if local is not None and chain is None and _is_over(local):
        jobs, job = job_named(target, address) or (jobs, job)  # of that name, with another run directory
    if jobs is not None and job is not None and not job.has_ended:
        _stop_job(jobs, job, wait, as_json)
    elif chain is not None:
        stop_stages(*chain, lambda run: _stop_controller(run, address), as_json)
    elif (directory := local or run_at(job.run_dir if job else "")) is not None:
        _stop_run(directory, address, wait, as_json)
    else:
        raise InputError("this job has ended already", target, "see `orchestrator list`")


def _stop_job(jobs: Jobs, job: Submission, wait: bool, as_json: bool) -> None:
    from cluster.jobs.ray_jobs import STOP_GRACE

    jobs.stop(job.id)
    job = jobs.wait(job.id, STOP_GRACE) if wait else job
    if as_json:
        emit(job.to_json())
    elif job.has_ended:
        next_start = {
            True: "continues from its last checkpoint",
            False: "starts from the beginning: no checkpoint yet",
            None: "goes on",
        }
        print(f"{job.id}: {job.state}; the same job {next_start[has_commit(job)]}")
    else:
        print(f"{job.run_dir} will commit and end")


def _stop_run(run: RunDir, address: str | None, wait: bool, as_json: bool) -> None:
    from orchestrator.launch.active_controller import refuse_if_over

    refuse_if_over(run)
    _stop_controller(run, address)
    state = _end_of(run) if wait else "stopping"
    if as_json:
        emit({"name": run.name, "run_dir": run.uri, "state": state})
    else:
        print(f"{run.uri}: {state}" if wait else f"{run.uri} will commit and end")


def _end_of(run: RunDir) -> str:
    """Wait for the end of a run that was asked to stop, and return its state."""
    from orchestrator.cli.followed import statuses

    *_, last = statuses(run)
    return str(last["phase"])


def _status_of(directory: RunDir) -> dict[str, Any]:
    from orchestrator.observe.last_status import ControllerState, last_status, state_of

    spec = existing_run(directory.uri)[1]
    unknown = {"name": spec.name, "phase": "unknown", "step": 0, "steps": spec.train.steps, "attempt": 0}
    current = {
        **unknown,
        "layout": None,
        "ranks": [],
        "time": 0.0,
        "controller": str(ControllerState.UNKNOWN),
        **last_status(directory),
    }
    summary = directory.read_json_or_empty("summary.json")
    current["state"] = summary["state"] if current["phase"] in ENDED and summary else state_of(current)
    return dict(current)


def _is_over(directory: RunDir) -> bool:
    """Whether a run has ended, or no controller drives it any more."""
    from orchestrator.observe.last_status import ControllerState, controller_state, last_status

    return controller_state(last_status(directory)) in (ControllerState.ENDED, ControllerState.GONE)


def _stop_controller(directory: RunDir, address: str | None) -> None:
    """Ask the controller of a run to stop, if no submitted job drives the run."""
    from cluster.local.address import NoAddress
    from cluster.local.ray_session import NoCluster, connected_ray
    from orchestrator.config.packages import PACKAGES
    from orchestrator.launch.active_controller import STOPPED, ask_to_stop
    from orchestrator.launch.controller_actor import controller_of
    from orchestrator.launch.submission import no_cluster

    try:
        with connected_ray(address or "auto", packages=PACKAGES):
            controller = controller_of(directory)
            if controller is None:
                ask_to_stop(directory)
                return
            import ray

            try:
                ray.get(controller.request_stop.remote(STOPPED), timeout=ANSWER)
            except (
                ray.exceptions.RayError
            ) as error:  # what it has not received when this command ends, it never receives
                problem = f"its controller, which starts or is very busy, has not heard of the stop in {ANSWER:.0f} s"
                hint = "give the command again"
                raise InputError(f"{problem} ({type(error).__name__})", directory.uri, hint) from None
    except NoAddress:
        ask_to_stop(directory)
    except NoCluster as error:
        raise no_cluster(error, address) from None


def _launched() -> float:
    """The start of this process in unix seconds, so that Python's start and imports count as wall time."""
    now, age = wall(), process_age()
    return now - age if 0.0 <= age <= LONGEST_START else now


def _faults(texts: list[str]) -> tuple[str, ...]:
    from cluster.workers.injected_faults import FaultSpec

    for text in texts:
        try:
            FaultSpec.parse(text)
        except ValueError as error:
            raise InputError(str(error), f"--fault {text}") from None
    return tuple(texts)


def _where_next(run_dir: str, tracking: str | None, form: str | None, summary: dict[str, Any]) -> None:
    import os

    from orchestrator.config.redact import redact

    relative = os.path.relpath(run_dir) if os.path.isabs(run_dir) else run_dir
    shown = run_dir if relative.startswith("..") else relative
    typed = shlex.quote(shown)
    if summary.get("sample"):
        _say("\nThe model says:\n  " + summary["sample"].strip().replace("\n", "\n  ") + "\n")
    _say("Where to look next")
    _say(f"  {shown}/report.html          the run as pictures")
    if summary.get("export"):
        loaded = {
            "hf": "the model, for from_pretrained of transformers; config.json names its class",
            "adapter": "the adapter, for peft.PeftModel.from_pretrained",
            "safetensors": "the model, for orchestrator.load_run(...).model()",
        }
        _say(f"  {shown}/export/              {loaded.get(form or '', f'the model as {form}')}")
        if pushed := summary["export"].get("pushed"):
            _say(f"  {pushed}      the model on the Hub")
        if why := summary["export"].get("not_pushed"):
            _say(f"  the export is not pushed: {why}")
        if reader := summary["export"].get("tokenizer_class"):
            _say(
                f"  its tokenizer, for transformers.{reader}.from_pretrained: AutoTokenizer makes another one of it"
            )
    _say(f"  orchestrator verify-resume {typed}      replay steps from a checkpoint and compare")
    _say(f"  orchestrator checkpoint list {typed}    the checkpoints")
    if tracking:
        # A server shows its runs itself; for a database or a folder the user starts a server.
        served = tracking.startswith(("http://", "https://"))
        uri = redact(tracking)
        _say(f"  {uri}" if served else f"  mlflow ui --backend-store-uri {shlex.quote(uri)}")
    mlflow = summary.get("tracking") or {}
    if refused := mlflow.get("refused"):
        _say(refused)
    if problem := mlflow.get("problem"):
        _say(
            f"MLflow lacks some rows ({problem}); `orchestrator report {typed}` sends them when it answers again"
        )


def _printed_last(summary: dict[str, Any]) -> None:
    """The last output of the rank that failed last."""
    fault: dict[str, Any] = next(iter(reversed(summary.get("faults") or ())), {})
    if fault.get("output"):
        _say(f"\n{fault['first_fault']}; printed last:")
        for line in fault["output"]:
            _say(f"  {line}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show_status(current: dict[str, Any]) -> None:
    from orchestrator.cli.options import table
    from orchestrator.config.records import worker_kind
    from orchestrator.observe.formatting import duration
    from orchestrator.storage.row_log import steps_text

    eta = f", {duration(current['eta_seconds'])} left" if current.get("eta_seconds") else ""
    print(
        f"{current.get('name')}: {current['state']}, step {current.get('step')} of {current.get('steps')}{eta}"
    )
    layout = current.get("layout") or "not chosen yet"
    print(f"attempt {current.get('attempt')}, layout {layout}, controller {current['controller']}")
    if current.get("note"):
        print(current["note"])
    if current.get("evaluation"):
        print(current["evaluation"])
    if current.get("why_slow"):
        print(current["why_slow"])
    if current.get("missing_rows"):
        print(f"rows of step {steps_text(current['missing_rows'])} are lost from metrics.jsonl")
    if current["ranks"]:
        columns = ["rank", "node", "pid", "state", "step", "doing"]
        table("", columns, [[str(rank.get(key, "")) for key in columns] for rank in current["ranks"]])
    if rollout_workers := current.get("rollout_workers"):
        rows = [[str(worker[key]) for key in ("node", "pid", "state")] for worker in rollout_workers]
        kind = worker_kind(current.get("objective", ""))
        table("", [f"{kind} worker on", "pid", "state"], rows)

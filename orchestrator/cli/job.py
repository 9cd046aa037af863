"""The commands init, schema, doctor and plan, for the time before a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli.chain import plan_chain
from orchestrator.cli.options import Json, Set, emit, jobs_of, on_this_machine, run_of, table
from orchestrator.cli.plan_output import show_audit, write_page
from orchestrator.cli.stage_notice import StageNotice
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.launch.doctor import Finding
    from orchestrator.launch.planned_job import PlannedJob
    from orchestrator.storage.run_directory import RunDir


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(init)
    app.command()(schema)
    app.command()(doctor)
    app.command()(plan)


def init(
    path: Annotated[Path, typer.Argument(parser=on_this_machine, help="file to write")] = Path("job.yaml"),
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "--text", help="training data: files or globs [default: corpus/*.txt]"),
    ] = None,
    from_hf: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="start from the model in a Hugging Face folder")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="a tokenizer [default: the model's, or a new one is trained]"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run [default: the name of the file]")] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="what to learn, such as sequence_classification [default: what the rows and the model fit]"
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            parser=on_this_machine,
            help="translate a configuration of axolotl, TRL, Hugging Face's Trainer, torchtitan or verl, or the script "
            "that starts one of them",
        ),
    ] = None,
) -> None:
    """Write a job file to start from. With --data, check it as `run` would."""
    from orchestrator.config.document import parse_yaml
    from orchestrator.config.paths import resolve_paths
    from orchestrator.config.records import COLUMNS
    from orchestrator.config.spec import parse
    from orchestrator.launch.first_job import chat_template_for, first_job, name_of, write_job
    from orchestrator.launch.job_checks import check_job
    from orchestrator.resolve.resolved_job import resolve
    from orchestrator.resolve.training_inputs import vocabulary_before_data

    if os.path.lexists(path):
        raise InputError("there is a file already", str(path), "give another name")
    if source is not None:
        other_options = {"--data": data, "--from-hf": from_hf, "--tokenizer": tokenizer}
        if other := next((option for option, value in other_options.items() if value), None):
            raise InputError(
                "does not go with --from", other, "leave it out, and change the job that is written"
            )
        _translate(source, path, name, objective)
        return
    named, template = name_of(path) if name is None else name, path.with_suffix(".jinja")
    made = first_job(
        named, data or ["corpus/*.txt"], from_hf, tokenizer, template=str(template), objective_name=objective
    )
    text = made.text
    where = str(path) if name is None else "the name"
    spec = resolve_paths(parse(parse_yaml(text, where), where), Path.cwd())
    if spec.workload.objective in COLUMNS and from_hf is None and tokenizer is None:
        raise InputError(
            f"{spec.workload.objective} reads records, and a tokenizer cannot be trained on records",
            "--tokenizer",
            "name a folder with one; or give --from-hf FOLDER for a model, or --objective causal_lm for plain text",
        )
    with contextlib.ExitStack() as written:
        if spec.data.chat_template:
            write_job(template, chat_template_for(str(spec.data.tokenizer)))
            written.callback(template.unlink)
        if data:
            check_job(spec, begins=True)
        elif tokenizer is not None:  # the default text may come later; what is named is there
            vocabulary_before_data(resolve(spec))
        write_job(path, text)
        written.pop_all()
    for line in made.lines if data else ():
        print(line)
    if spec.data.chat_template:
        print(
            f"{template} is written: a chat template, because the tokenizer has none; change it as you like"
        )
    typed = shlex.quote(str(path))
    print(f"{path} is written; next: orchestrator plan {typed}, then orchestrator run {typed}")


def _translate(source: Path, path: Path, name: str | None, objective: str | None) -> None:
    """Write the job of another trainer's configuration, and say what was assumed and what has no place."""
    from orchestrator.config.spec import parse
    from orchestrator.launch.first_job import write_job
    from orchestrator.launch.foreign_jobs.translate import translate

    translated = translate(source, name, objective)
    parse(translated.document, str(source))
    write_job(path, translated.text(str(source)))
    for line in translated.lines:
        print(line)
    if translated.left:
        table(
            f"Keys of {translated.trainer} without a place",
            ["key", "nearest"],
            [[*pair] for pair in translated.left],
        )
    typed = shlex.quote(str(path))
    print(f"{path} is written; next: orchestrator plan {typed}, then orchestrator run {typed}")


def schema(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="describe this key and those below it, such as train.optimizer; `job` describes all",
        ),
    ] = None,
) -> None:
    """Describe keys of the job file. Without a key, print the JSON Schema for editors."""
    from orchestrator.config import chain
    from orchestrator.config.described import sections_of

    if key is None:
        print(chain.schema())
        return
    for section in sections_of(key):
        rows = [
            [described.name, described.type, described.default, described.meaning]
            for described in section.keys
        ]
        table(section.path or "the job", ["key", "type", "default", "meaning"], rows)


def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB]",
            help="a job file: also show the libraries that it needs, and their extras",
            parser=on_this_machine,
        ),
    ] = None,
    overrides: Set = None,
    burn_in: Annotated[
        bool,
        typer.Option(
            "--burn-in",
            help="also test the devices: matrix multiplications with known bits, patterns in memory, "
            "collectives with known sums",
        ),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="how long --burn-in repeats matrix multiplications and collectives"
        ),
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Show what this machine can run and what is missing. With a job, also show the optional libraries it needs."""
    from orchestrator.launch.doctor import examine

    if overrides and job is None:
        raise InputError("there is no job to change", "--set", "give a job file")
    findings = examine()
    if job is not None:
        findings += _needs(job, overrides)
    if burn_in:
        from orchestrator.launch.burn_in import burn_in_findings

        findings += burn_in_findings(seconds)
    if as_json:
        emit([finding.to_json() for finding in findings])
    else:
        table("This machine", ["", "what", "found", "hint"], [f.row() for f in findings])
    if any(finding.verdict in ("missing", "wrong") for finding in findings):
        raise typer.Exit(1)


def _needs(path: Path, overrides: list[str] | None) -> list[Finding]:
    """Whether each optional library that a job or a stage of a chain needs is installed."""
    from orchestrator.config.chain import ChainSpec
    from orchestrator.launch.job_needs import needed_libraries

    spec = jobs_of(path, overrides)
    jobs = [stage.job for stage in spec.stages] if isinstance(spec, ChainSpec) else [spec]
    return [need.finding for need in dict.fromkeys(need for job in jobs for need in needed_libraries(job))]


Trace = Literal["wait", "off"]


def plan(
    job: Annotated[Path | None, typer.Argument(help="the job file", show_default=False)] = None,
    overrides: Set = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="number of workers [default: resources.workers.max]")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="a device that need not be here, such as a100-80, or a profile file [default: this machine]",
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            parser=on_this_machine,
            help="a cluster file, for a cluster that need not exist: also predict days, money, energy and goodput",
        ),
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="compare predictions with measurements of the runs in a folder, instead of planning",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(parser=on_this_machine, help="also write a page with the timeline and memory of a step"),
    ] = None,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="also show time and cost for each number of workers up to --workers"),
    ] = False,
    trace: Annotated[
        Trace,
        typer.Option(
            help="wait for the traced memory of the chosen layout, or off: a closed formula alone, without the seconds "
            "of a trace"
        ),
    ] = "wait",
    as_json: Json = False,
) -> None:
    """Check a job and show its legal layouts with predicted memory and time, for this machine or another."""
    from orchestrator.config.chain import ChainSpec

    if audit is not None:
        show_audit(audit, as_json)
        return
    if job is None:
        raise InputError("no job file is given", "JOB", "name one, or a folder of runs with --audit")
    spec = jobs_of(job, overrides)
    if isinstance(spec, ChainSpec) and (html or cluster):
        where = "--html" if html else "--cluster"
        raise InputError("a chain has several plans", where, "give the job file of one stage")
    if cluster and (machine or workers):
        raise InputError(
            "the cluster file names the machines", "--cluster", "leave out --machine and --workers"
        )
    if isinstance(spec, ChainSpec):
        plan_chain(
            spec,
            run_of(spec.name, None),
            lambda planned_spec: _plan(
                planned_spec,
                workers,
                device=machine,
                html=None,
                at=None,
                by_workers=frontier,
                as_json=as_json,
                trace=trace,
            ),
            as_json,
        )
    elif plan_json := _plan(
        spec,
        workers,
        device=machine,
        html=html,
        at=cluster,
        by_workers=frontier,
        as_json=as_json,
        trace=trace,
        run=run_of(spec.name, None),
    ):
        emit(plan_json)


def _plan(
    spec: JobSpec,
    workers: int | None,
    device: str | None,
    html: Path | None,
    at: Path | None,
    by_workers: bool,
    as_json: bool,
    trace: Trace,
    run: RunDir | None = None,
) -> dict[str, Any] | None:
    """The plan of a job as JSON; or None, when it is printed. On this machine all is checked that `run` checks, if
    there is a `run` directory."""
    from orchestrator.cli import plan_table
    from orchestrator.cli.cluster_plan import read_cluster, show_forecast
    from orchestrator.launch.forecast import forecast_of
    from orchestrator.launch.planned_job import planned_locally, planned_on_paper
    from orchestrator.planner.demand import demand_of
    from orchestrator.planner.frontier import frontier
    from orchestrator.planner.planner import with_workers

    cluster = None
    if at:
        cluster, workers = read_cluster(at)
        device = cluster.device
    if workers:
        spec = spec.with_parts(resources=with_workers(spec.resources, workers))
    with StageNotice(as_json) as notice:
        notice.begin("checking the job and comparing layouts")
        by_formula = (
            planned_locally(spec, run, False, begin=notice.begin)
            if device is None
            else planned_on_paper(spec, device, False, run)
        )
        planned, is_shown = _traced(by_formula, notice, waits=trace == "wait", shows=not as_json)
    spec, shape = planned.job.spec, planned.job.shape
    if html:
        write_page(html, planned)
    prediction = forecast_of(planned, cluster) if cluster else None
    points = []
    if by_workers:
        max_workers = spec.resources.workers.max
        points = frontier(
            demand_of(spec),
            shape,
            workers=max_workers,
            machine=planned.machine,
            must_fit=planned.must_fit,
            verdicts=planned.verdicts,
            usd=spec.limits.usd_per_worker_hour,
        )
    if as_json:
        more: dict[str, Any] = {"frontier": [point.to_json() for point in points]} if by_workers else {}
        return planned.to_json() | more | ({"cluster": prediction} if prediction else {})
    if not is_shown:
        plan_table.show_layouts(planned)
    plan_table.show_memory(planned.plan, planned.traced, planned.on_cpu)
    plan_table.show_rollouts(planned.rollouts)
    plan_table.show_teachers(planned.teachers)
    plan_table.show_precision(planned.choice)
    for line in planned.assumed:
        print(f"Assumed: {line}.")
    for line in planned.job.notes:
        print(f"Note: {line}.")
    if by_workers:
        plan_table.show_frontier(points)
    if prediction:
        show_forecast(spec.train, prediction)
    return None


def _traced(by_formula: PlannedJob, notice: StageNotice, waits: bool, shows: bool) -> tuple[PlannedJob, bool]:
    """Trace the memory of a planned job if the user `waits` for it.

    The layouts are shown before, since the trace takes seconds. Return the plan, and whether its layouts are shown.
    """
    from orchestrator.cli import plan_table
    from orchestrator.launch.planned_job import with_trace

    plan = by_formula.plan
    notice.begin("tracing the memory of layouts")
    if by_formula.refused:
        print(
            f"orchestrator: `run` would refuse this without another --run-dir: {by_formula.refused}",
            file=sys.stderr,
        )
    # otherwise there may be no layout to show, but only an error
    is_shown = shows and (plan.fits or not (waits and by_formula.must_fit))
    if is_shown:
        plan_table.show_layouts(by_formula)
    if not waits:
        return by_formula, is_shown
    if is_shown:
        print(f"Tracing the memory of {plan.chosen.layout}, for some seconds.", flush=True)
    planned = with_trace(by_formula)
    return planned, is_shown and planned.plan is plan

"""The commands init, schema, doctor and plan: what is done before a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Job, Json, Set, emit, job_of, on_this_machine, table
from orchestrator.job.errors import InputError

TEMPLATE = """\
# A job: what to train, on what, and where. `orchestrator schema` describes every key.
name: {name}
seed: 17
workload: {{model: gpt-tiny, objective: causal_lm}}
data:
  sources: [{{uri: {text}, weight: 1.0}}]   # .txt, .jsonl or .parquet; globs and s3:// work
  tokenizer: {{train_bpe: 4096}}
  sequence_length: 128
train:
  steps: 200
  global_batch: 32                            # sequences a step; never changes
  optimizer: {{name: adamw, lr: 1.0e-3, warmup: 20, schedule: cosine}}
  precision: fp32
parallel: auto
resources: {{workers: {{min: 1, max: 2}}, per_worker: {{cpu: 1, gpu: 0}}}}
checkpoint: {{every: 20, keep: 3, export: hf}}
tracking: {{uri: "sqlite:///mlflow.db", experiment: {name}}}
"""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(init)
    app.command()(schema)
    app.command()(doctor)
    app.command()(plan)


def init(
    path: Annotated[Path, typer.Argument(parser=on_this_machine, help="where to write it")] = Path(
        "job.yaml"
    ),
    text: Annotated[str, typer.Option(help="the text to train on")] = "corpus/*.txt",
    name: Annotated[str | None, typer.Option(help="the run's name [default: the file's]")] = None,
) -> None:
    """Write a job file to start from."""
    import yaml

    from orchestrator.job.spec import parse

    if os.path.lexists(path):
        raise InputError("there is a file already", str(path), "give another name")
    chosen = path.stem if name is None else name
    document = TEMPLATE.format(name=json.dumps(chosen), text=json.dumps(text))
    parse(yaml.safe_load(document), str(path) if name is None else "the name")
    try:
        with path.open("x") as file:
            file.write(document)
    except FileExistsError:
        raise InputError("there is a file already", str(path), "give another name") from None
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", str(path), "give another path") from None
    print(f"{path} is written; next: orchestrator plan {path}, then orchestrator run {path}")


def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    from orchestrator.job import spec

    print(spec.schema())


def doctor(as_json: Json = False) -> None:
    """Check what this machine can run, and what is missing."""
    from orchestrator.launch.doctor import examine

    findings = examine()
    if as_json:
        emit([finding.to_json() for finding in findings])
    else:
        table("This machine", ["", "what", "found", "hint"], [f.row() for f in findings])
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


def plan(
    job: Job,
    overrides: Set = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="how many workers [default: resources.workers.max]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a job, and show its legal layouts on this kind of machine with predicted memory and time."""
    from orchestrator.cli import plan_table as planning_text
    from orchestrator.job.errors import Problems
    from orchestrator.launch.preflight import check_job, check_machine
    from orchestrator.planning import plan as planning
    from orchestrator.planning.machines import machine_for

    spec, problems = job_of(job, overrides), Problems()
    with problems.noted():
        shape = check_job(spec).shape
    with problems.noted():
        check_machine(spec, None)
    problems.raise_noted()
    machine = machine_for(None, spec.resources.per_worker.bundle)
    found = planning.plan(spec, shape, workers or spec.resources.workers.max, machine)
    if as_json:
        emit(found.to_json())
    else:
        planning_text.show(spec, shape, found)

"""The commands evaluate and generate: what the model of a commit is worth on held-out text, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.checkpoint import Step, chosen_commit
from orchestrator.cli.data import prepared_with_progress
from orchestrator.cli.options import Address, Json, Run, emit, existing_run, finite, table
from orchestrator.job.errors import InputError

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest
    from orchestrator.job.spec import JobSpec
    from orchestrator.storage.run_directory import RunDir


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(evaluate)
    app.command()(generate)


def evaluate(
    run_dir: Run,
    step: Step = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILES",
            help="text besides that of the job, as in wiki='wiki/*.txt'; may be repeated",
        ),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Evaluate a commit on the held-out text of its job, and on other text. Nothing of the run is changed."""
    from orchestrator.evaluate.of_commit import evaluate_commit

    run, spec = existing_run(run_dir)
    commit = chosen_commit(run, step)
    spec = _with_sets(spec, on or [])
    row = evaluate_commit(spec, run, commit, _sets(spec, run, commit, address))
    if as_json:
        emit(row)
        return
    names = list(dict.fromkeys(name for metrics in row["sets"].values() for name in metrics))
    rows = [[name, *(f"{found[key]:.6g}" for key in names)] for name, found in row["sets"].items()]
    table(f"Step {row['step']}", ["set", *names], rows)


def generate(
    run_dir: Run,
    prompts: Annotated[list[str], typer.Argument(help="texts that the model continues, or answers")],
    step: Step = None,
    tokens: Annotated[int, typer.Option(min=1, help="most tokens of each")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="0 takes the likeliest token, else they are drawn")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn")] = 0,
    as_json: Json = False,
) -> None:
    """Continue prompts with the model of a commit."""
    from orchestrator.checkpoint.store import Store
    from orchestrator.evaluate.samples import continue_prompts
    from orchestrator.resolve.prepared_data import data_of
    from orchestrator.resolve.resolved_job import wrong_input
    from orchestrator.resolve.training_inputs import workload_of
    from workloads.workload import Sampling

    run, spec = existing_run(run_dir)
    store, commit = Store(run.at("checkpoints")), chosen_commit(run, step)
    data = data_of(run, commit.meta["data"])
    workload, reader = workload_of(spec, data), store.reader(commit)
    with wrong_input("prompts"):
        said = continue_prompts(
            workload,
            lambda name: reader.read(f"model.{name}"),
            data.tokenizer(),
            prompts,
            tokens,
            Sampling(temperature=temperature, seed=seed),
        )
    if as_json:
        emit([{"prompt": prompt, "text": text} for prompt, text in zip(prompts, said, strict=True)])
        return
    for prompt, text in zip(prompts, said, strict=True):
        print(f"{prompt}{text}\n")


def _with_sets(spec: JobSpec, on: list[str]) -> JobSpec:
    """The job with further sets. Raises InputError for what is no NAME=FILES, and if there is no set at all."""
    from orchestrator.job.paths import absolute
    from orchestrator.job.spec import parse

    document = spec.model_dump(mode="json")
    document["evaluate"] = document["evaluate"] or {}
    sets = document["evaluate"].setdefault("sets", {})
    for text in on:
        name, equals, uri = text.partition("=")
        if not (name and equals and uri):
            raise InputError("is not NAME=FILES", f"--on {text}", "write it as in wiki='wiki/*.txt'")
        sets[name] = {"sources": [{"uri": absolute(uri, Path.cwd())}]}
    if not sets and spec.data.validation is None:
        raise InputError("the run holds no text out", "--on", "name some, as in --on wiki='wiki/*.txt'")
    return parse(document, "--on")


def _sets(spec: JobSpec, run: RunDir, commit: CommitManifest, address: str | None) -> dict[str, str]:
    """The prepared data of the sets that have text of their own; what is missing is made, with Ray."""
    from orchestrator.resolve.prepared_data import PreparedData, tokens_of

    if not spec.set_sources:
        return {}
    before = PreparedData(tokens_of(spec, run, commit.meta["data"]).folder.uri, commit.meta.get("sets", {}))
    return prepared_with_progress(spec, run, before, address).sets

"""The commands data corpus, prepare, vocabulary, inspect, report and rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import (
    Address,
    Job,
    Json,
    RunDirectory,
    Set,
    emit,
    existing_run,
    finite,
    job_of,
    on_this_machine,
    run_of,
)
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.data.config import DataSpec
    from orchestrator.resolve.prepared_data import PreparedData


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(no_args_is_help=True, help="Turn raw text into token shards, and inspect them.")
    group.command()(corpus)
    group.command()(prepare)
    group.command()(vocabulary)
    group.command()(inspect)
    group.command()(report)
    group.command()(rollouts)
    app.add_typer(group, name="data")


def corpus(
    folder: Annotated[Path, typer.Argument(parser=on_this_machine, help="folder for the .txt files")] = Path(
        "corpus"
    ),
    as_json: Json = False,
) -> None:
    """Collect real text from this machine: the docstrings of installed packages."""
    from orchestrator.data.corpus import collect

    content = collect(str(folder.absolute()))
    if as_json:
        emit(content)
    else:
        print(
            f"{folder}: {content['bytes'] / 2**20:.1f} MiB of documentation strings in {len(content['files'])} files"
        )


def prepare(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make the token shards of a job, without training and without loading its model."""
    from orchestrator.cli.prepared_job import prepared_job

    spec, data = prepared_job(job, overrides, run_dir, address)
    sets, notes = _held_out(spec, data)
    removed = _removed(data.uri)
    if as_json:
        emit({"data": data.uri, "held_out": sets, "notes": notes, "clean": removed})
        return
    if removed:
        show_removed(removed)
    print(data.uri)
    for name, held_out in sets.items():
        print(
            f"held out as {name}: "
            + ", ".join(
                f"{held_out[key]} {key}"
                for key in ("samples", "documents", "tokens", "bytes")
                if key in held_out
            )
        )
    for line in notes:
        print(line)


def vocabulary(
    job: Job,
    folder: Annotated[Path, typer.Argument(parser=on_this_machine, help="folder for the smaller model")],
    at_least: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="also remove tokens that the data uses less often; shorter tokens replace them",
        ),
    ] = 1,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Copy the pretrained model of a job without the tokens that its data never uses.

    The tokenizer is copied with the entries that are left, which encode every text of the job to the same tokens,
    renumbered. With --at-least, texts with a rare token get shorter tokens in its place.
    """
    from orchestrator.export.vocabulary import without_unused_tokens
    from orchestrator.launch.job_checks import JobChecks
    from orchestrator.launch.preparation import prepared_with_progress
    from orchestrator.resolve.prepared_data import PreparedData

    spec = job_of(job, overrides)
    run = run_of(spec.name, run_dir)
    JobChecks(spec).without_model()

    def prepare(folder: str) -> PreparedData:
        return prepared_with_progress(spec.over_folder(folder), run, PreparedData(), address)

    data = prepared_with_progress(spec, run, PreparedData(), address)
    made = without_unused_tokens(
        spec.workload.model, spec.data.tokenizer, data, str(folder), prepare, at_least=at_least
    )
    if as_json:
        emit(made)
        return
    print(
        f"{folder}: {made['tokens']} of {made['tokens_before']} tokens, {made['parameters']} of "
        f"{made['parameters_before']} parameters; name it in workload.model and data.tokenizer"
    )
    if made["length"] != made["length_before"]:
        print(
            f"the data has {made['length']} tokens, {made['length'] / made['length_before'] - 1:.1%} more than before; "
            f"unknown: {made['unknown']}, before {made['unknown_before']}"
        )


def _held_out(spec: JobSpec, data: PreparedData) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The held-out sets by name, and notes for the user, one line each."""
    from orchestrator.data.prepare.rejections import notes_of
    from orchestrator.data.store.summary import sizes
    from orchestrator.evaluate.config import VALIDATION
    from orchestrator.resolve.training_inputs import resolve_over

    share = spec.data.validation and spec.data.validation.share
    if spec.data.samples is not None:
        return _held_out_samples(spec.data, spec.seed, data.uri)
    shares: dict[str, dict[str, Any]] = {VALIDATION: {**sizes(data.uri, share)}} if share else {}
    sets = {**shares, **{name: {"uri": uri, **sizes(uri)} for name, uri in data.sets.items()}}
    return sets, resolve_over(spec, data)[2] if sets else notes_of(data.uri)


def _held_out_samples(data: DataSpec, seed: int, uri: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    from orchestrator.data.prepare import rejections
    from orchestrator.data.samples.own_samples import batches_of_samples
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.evaluate.config import VALIDATION

    prepared = manifest.read(DataFolder(uri))
    assert prepared is not None
    assert data.samples is not None
    share = data.validation.share if data.validation else None
    held_out = batches_of_samples(data.samples, seed, share, prepared, uri)[1]
    return {VALIDATION: {"samples": held_out.samples}} if held_out else {}, rejections.notes_of(uri)


def _removed(uri: str) -> list[dict[str, Any]]:
    """The number of documents that each step of data.clean removed, without samples."""
    from orchestrator.data.clean.totals import read_totals
    from orchestrator.data.store.census import with_tokens
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.tokens import Tokens

    steps = read_totals(DataFolder(uri))
    counted = with_tokens(steps, Tokens.open(uri)) if steps else []
    return [{key: value for key, value in step.items() if key != "samples"} for step in counted]


def show_removed(steps: list[dict[str, Any]]) -> None:
    """Print what each step of data.clean removed."""
    from orchestrator.cli.options import table
    from orchestrator.observe.formatting import count
    from orchestrator.observe.pages.page import size

    rows = []
    for step in steps:
        total = {key: sum(source[key] for source in step["sources"]) for key in step["sources"][0]}
        share = total["removed"] / total["documents"] if total["documents"] else 0.0
        reasons = ", ".join(f"{reason} {number}" for reason, number in list(step["reasons"].items())[:3])
        rows.append(
            [
                step["step"],
                str(total["documents"]),
                f"{total['removed']} ({share:.1%})",
                str(total["changed"] or ""),
                size(total["bytes"] - total["bytes_after"]),
                f"about {count(total['removed_tokens'])}",
                reasons,
            ]
        )
    columns = ["step", "documents", "removed", "changed", "text less", "tokens less", "most for"]
    table("Cleaning", columns, rows)


def inspect(
    data: Annotated[str, typer.Argument(help="a folder of prepared data, a job file, or a run directory")],
    share: Annotated[
        float | None,
        typer.Option(
            help="show what this data.validation.share would hold out", min=0.0, max=1.0, callback=finite
        ),
    ] = None,
    removed_by: Annotated[
        str | None,
        typer.Option("--removed-by", help="show documents that this step of data.clean removed"),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            help="show the sample at this position in the order of a job or a run", min=0, max=2**53
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="show the sample with this number", min=0, max=2**53)
    ] = None,
    turn: Annotated[int, typer.Option(help="with --sample, the pass over its source", min=0, max=2**53)] = 0,
    count: Annotated[int, typer.Option(help="with --at, the number of samples", min=1, max=1000)] = 1,
    overrides: Set = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show the content of a folder of prepared data. For a job or a run, show how often it reads each source, and
    samples as the model sees them. Data of a job that is not prepared yet is prepared first."""
    from orchestrator.cli import data_samples
    from orchestrator.config.paths import absolute
    from orchestrator.data.store.summary import inspect as look

    if removed_by is None and (inputs := data_samples.inputs_of(data, overrides, address)) is not None:
        _refuse({"--share": share is not None}, data, "name the folder of prepared data")
        _refuse({"--turn": bool(turn and sample is None)}, data, "give --sample")
        _refuse({"--count": count > 1 and at is None}, data, "give --at")
        result = data_samples.describe(*inputs, data_samples.Wanted(at, sample, turn, count))
        emit(result) if as_json else data_samples.show(result)
        return
    _refuse({"--set": bool(overrides)}, data, "it is for a job file")
    options = {
        "--at": at is not None,
        "--sample": sample is not None,
        "--turn": turn > 0,
        "--count": count > 1,
    }
    if any(options.values()) and removed_by is None:
        look(absolute(data, Path.cwd()), None)  # raises if there is no data either
        _refuse(
            options,
            data,
            "this is prepared data; name a job file or a run directory, which make samples of it",
        )
    _refuse(options, data, "it does not go with --removed-by")
    _inspect_prepared(data, share, removed_by, as_json)


def _refuse(options: dict[str, bool], data: str, hint: str) -> None:
    for option in (option for option, is_given in options.items() if is_given):
        raise InputError(f"{option} does nothing here", data, hint)


def _inspect_prepared(data: str, share: float | None, removed_by: str | None, as_json: bool) -> None:
    from orchestrator.config.paths import absolute
    from orchestrator.data.clean.totals import removed_by as look_removed
    from orchestrator.data.store.summary import inspect as look

    if removed_by is not None:
        steps = look_removed(absolute(data, Path.cwd()), removed_by)
        if as_json:
            emit(steps)
            return
        for step in steps:
            print(
                f"{step['step']}: "
                + (", ".join(f"{why} {n}" for why, n in step["reasons"].items()) or "nothing")
            )
            for sample in step["samples"]:
                print(f"- {sample['reason']}\n    " + sample["text"].replace("\n", "\n    "))
        return
    content = look(absolute(data, Path.cwd()), share)
    if as_json:
        emit(content)
        return
    for key, value in content.items():
        print(f"{key}: {value}")


def report(
    data: Annotated[str, typer.Argument(help="a folder of prepared data")],
    out: Annotated[
        str | None, typer.Option(help="file of the page [default: data-report.html]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page about prepared data: lengths, languages, sources, duplicates, rejected and removed documents."""
    from orchestrator.config.paths import absolute
    from orchestrator.data.store.census import census
    from orchestrator.observe.pages.data_report import page

    counts = census(absolute(data, Path.cwd()))
    if as_json:
        emit(counts)
        return
    target = Path(out or "data-report.html").absolute()
    try:
        target.write_text(page(counts), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror})", str(target), "name another file by --out"
        ) from None
    print(target)


def rollouts(
    run: Annotated[str, typer.Argument(help="a run directory, or a name in the folder runs")],
    step: Annotated[
        int | None, typer.Option(min=1, help="the step [default: the last one kept]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the prompts of a step, the answers that the model generated to them, and their rewards."""
    from orchestrator.train.rollouts.stored_rollouts import read_kept

    kept_step, answers = read_kept(existing_run(run)[0].uri, step)
    if as_json:
        emit({"step": kept_step, "answers": answers})
        return
    epoch = answers[0].get("epoch", 1) if answers else 1
    print(f"step {kept_step}" + (f", epoch {epoch} of its rollout" if epoch > 1 else ""))
    prompt = None
    for answer in answers:
        if answer["prompt_number"] != prompt:
            prompt = answer["prompt_number"]
            print(f"\nprompt {prompt}: {answer['prompt']}")
        reward = "no reward" if answer["reward"] is None else f"{answer['reward']:g}"
        end = "" if answer["ended"] else ", cut"
        print(f"  {reward} ({answer['tokens']} tokens{end}): {answer['answer']}")

"""The commands evaluate and generate: metrics of a model on held-out text and tasks, and text from it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from orchestrator.cli.checkpoint import RawWeights, Step
from orchestrator.cli.options import Address, Json, emit, existing_run, finite, run_names, table
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.api.measured import CommitOfRun
    from orchestrator.evaluate.speaker import Speaker
    from orchestrator.evaluate.task_files import TaskFile
    from orchestrator.storage.row_types import EvaluationRow
    from workloads.workload import Sampling

T = TypeVar("T")
Model = Annotated[
    str,
    typer.Argument(
        metavar="RUN|COMMIT|EXPORT",
        help="a run directory, a checkpoint in one, or a folder in the Hugging Face format",
        show_default=False,
        autocompletion=run_names,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(evaluate)
    app.command()(generate)


def evaluate(
    model: Model,
    step: Step = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILES",
            help="another held-out set, such as wiki='wiki/*.txt'; repeat",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="a task file in lm-eval's format; repeat. Held-out text is then evaluated only with --on",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="override a key of the job that evaluates an export"),
    ] = None,
    raw_weights: RawWeights = False,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on the held-out text of its job, on other text, or on tasks. The run does not change."""
    from orchestrator.evaluate.task_files import read_tasks

    sets, files = _texts(on or []), read_tasks([absolute_path(path) for path in tasks or []])

    def measure(subject: CommitOfRun | _Export) -> tuple[EvaluationRow | None, EvaluationRow | None]:
        if files:
            _tell_settings(subject)
        row = subject.on_text(sets, address) if sets or not files else None
        return row, subject.on_tasks(files) if files else None

    row, task_row = _measured(model, step, overrides or [], raw=raw_weights, measure=measure)
    first = row or task_row
    assert first is not None
    text_sets = row["sets"] if row else {}
    if as_json:
        emit({**first, "sets": text_sets, **({"tasks": task_row["sets"]} if task_row else {})})
        return
    averaged = ", averaged weights" if "weights" in first else ""
    print(f"Step {first['step']}{averaged}" if first["step"] else model)
    if text_sets:
        names = list(dict.fromkeys(name for metrics in text_sets.values() for name in metrics))
        rows = [[key, *(f"{m[n]:.6g}" if n in m else "" for n in names)] for key, m in text_sets.items()]
        # Rows and MLflow call it `tokens`; a classifier predicts records.
        table("", ["set", *("predicted" if name == "tokens" else name for name in names)], rows)
    if task_row:
        metrics = [
            (task, *metric) for task, by_metric in task_row["sets"].items() for metric in by_metric.items()
        ]
        table(
            "", ["task", "metric", "value"], [[task, name, f"{value:.6g}"] for task, name, value in metrics]
        )
    for sample in row.get("samples", ()) if row else ():
        print(f"{sample['prompt']}\n=> {sample['text']}\n")


def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(help="texts that the model continues or answers")],
    step: Step = None,
    tokens: Annotated[int, typer.Option(min=1, help="maximum number of tokens per text")] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, callback=finite, help="0 takes the likeliest token; above 0 tokens are sampled"
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the sampling")] = 0,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="continue the bare text, even with a model that answers as a chat"),
    ] = False,
    raw_weights: RawWeights = False,
    as_json: Json = False,
) -> None:
    """Continue prompts with a model. A model trained on conversations answers each prompt as a user's message."""
    from workloads.workload import Sampling

    sampling = Sampling(temperature=temperature, seed=seed)

    def say(subject: CommitOfRun | _Export) -> tuple[list[str], bool]:
        _tell_settings(subject)
        return subject.says(prompts, tokens, sampling, raw)

    texts, answers = _measured(model, step, [], raw_weights, say)
    if as_json:
        emit([{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)])
        return
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt}\n=> {text}\n" if answers else f"{prompt}{text}\n")


def load_speaker(model: str, step: int | None, raw: bool) -> Speaker:
    """Return the model of a run or an export in memory. Raises InputError."""

    def load(subject: CommitOfRun | _Export) -> Speaker:
        _tell_settings(subject)
        return subject.speaker()

    return _measured(model, step, [], raw, load)


def absolute_path(uri: str) -> str:
    """A path as an absolute one, a URI as it is."""
    from orchestrator.config.paths import absolute

    return absolute(uri, Path.cwd())


def _texts(on: list[str]) -> dict[str, str]:
    """The files of each --on by name. Raises InputError if a text is not NAME=FILES."""
    files_by_name = {}
    for text in on:
        name, equals, uri = text.partition("=")
        if not (name and equals and uri):
            raise InputError("is not NAME=FILES", f"--on {text}", "write it as in wiki='wiki/*.txt'")
        files_by_name[name] = absolute_path(uri)
    return files_by_name


def _tell_settings(subject: CommitOfRun | _Export) -> None:
    """Say on stderr which settings of the model's folder are not applied to what it generates."""
    from orchestrator.resolve.prompts import settings_notes

    for line in settings_notes(subject.model):
        print(line, file=sys.stderr)


class _Export:
    """The model in a folder in the Hugging Face format."""

    def __init__(self, folder: str, overrides: list[str]) -> None:
        from orchestrator.evaluate.of_export import spec_of_export

        self._folder, self._overrides = folder, overrides
        self.model = f"hf:{folder}"
        spec_of_export(folder, {}, overrides)  # report problems with it before anything starts

    def on_text(self, texts: dict[str, str], address: str | None) -> EvaluationRow:
        """Return the metrics on these sets, whose data is prepared for this evaluation only."""
        from orchestrator.config.paths import resolve_paths
        from orchestrator.data.sources.check import check_sources
        from orchestrator.evaluate.of_export import (
            evaluate_export,
            format_of_export,
            notes_of_export,
            spec_of_export,
            workload_of_export,
        )
        from orchestrator.launch.preparation import prepared_with_progress
        from orchestrator.resolve.prepared_data import PreparedData
        from orchestrator.storage.run_directory import RunDir

        if not texts:
            raise InputError(
                "an export has no held-out text", "--on", "name some, as in --on wiki='wiki/*.txt'"
            )
        spec, step = spec_of_export(self._folder, texts, self._overrides)
        for line in notes_of_export(self._folder, spec.workload):
            print(line, file=sys.stderr)
        spec = resolve_paths(spec, Path.cwd())
        check_sources(spec.data, spec.workload.objective, spec.set_sources)
        workload_of_export(spec)
        with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
            run = RunDir(f"{folder}/run")
            before = PreparedData(format=format_of_export(self._folder))
            return evaluate_export(
                spec.model_dump(mode="json"),
                prepared_with_progress(spec, run, before, address),
                step,
                model=spec.workload.model,
                global_batch=spec.train.global_batch,
                worker=spec.resources.per_worker,
            )

    def on_tasks(self, files: list[TaskFile]) -> EvaluationRow:
        """Return the metrics on these tasks."""
        from orchestrator.evaluate.of_export import spec_of_export
        from orchestrator.evaluate.on_tasks import run_tasks

        spec, _ = spec_of_export(self._folder, {}, self._overrides)
        model = {"export": self._folder, "overrides": self._overrides}
        return run_tasks(files, model, spec.resources.per_worker.bundle)

    def speaker(self) -> Speaker:
        """As `CommitOfRun.speaker`."""
        from orchestrator.evaluate.speaker import speaker_of_export

        return speaker_of_export(self._folder)

    def says(self, prompts: list[str], tokens: int, sampling: Sampling, bare: bool) -> tuple[list[str], bool]:
        """As `CommitOfRun.says`."""
        from orchestrator.evaluate.of_export import (
            chat_of_export,
            spec_of_export,
            tokenizer_of_export,
            workload_of_export,
        )
        from orchestrator.evaluate.samples import continue_prompts
        from orchestrator.resolve.resolved_job import wrong_input

        spec, _ = spec_of_export(self._folder, {})
        workload, tokenizer = workload_of_export(spec), tokenizer_of_export(spec.data, spec.workload)
        chat = None if bare else chat_of_export(spec.data, spec.workload, tokenizer)
        with wrong_input("prompts"):
            texts = continue_prompts(
                workload,
                lambda name: workload.initial(name, spec.seed),
                tokenizer=tokenizer,
                prompts=prompts,
                max_tokens=tokens,
                sampling=sampling,
                chat=chat,
                scheme=spec.quantize.scheme if spec.quantize else None,
            )
        return texts, chat is not None


def _measured(
    model: str,
    step: int | None,
    overrides: list[str],
    raw: bool,
    measure: Callable[[CommitOfRun | _Export], T],
) -> T:
    """Call `export` for a folder with a config.json, else `commit`, and return the result."""
    from orchestrator.api.measured import CommitOfRun
    from orchestrator.api.place import place_of
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.checkpoint.resolve_checkpoint import read_chosen, run_and_step
    from orchestrator.evaluate.of_export import is_export
    from orchestrator.storage.uri import check_uri, is_local, local_path

    check_uri(model)
    if is_local(model) and is_export(local_path(model)):
        if step is not None:
            raise InputError("an export has one step", "--step", "leave it out")
        if raw:
            hint = "leave it out, or give it to checkpoint export"
            raise InputError(
                "an export has one set of weights, chosen when it was made", "--raw-weights", hint
            )
        return measure(_Export(local_path(model), overrides))
    place = place_of(model)
    folder, step = run_and_step(place, step, f"--step {step}")
    if overrides:
        raise InputError(
            "a run is evaluated by its own job file", "--set", "leave it out; it is for an export"
        )
    run = existing_run(model if folder == place else folder)[0]
    store = Store(run.commits)
    return read_chosen(
        store, step, lambda number: measure(CommitOfRun(run, store.manifest(number), raw, "--on"))
    )

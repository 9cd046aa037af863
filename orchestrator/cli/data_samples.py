"""`data inspect` of a job or a run: its samples as the model sees them, and how often it reads each source."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import Absent, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from orchestrator.data.samples.inspect import Decode, Spot
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.models.continued import Source
    from orchestrator.resolve.training_inputs import TrainingInputs
    from orchestrator.train.config import TrainSpec

STYLES = {
    "boundary": "bold cyan",
    "padding": "dim italic",
    "replaced": "red",
    "label": "green",
    "predicted": "",
    "read": "dim",
}


@dataclass(frozen=True)
class Wanted:
    """The samples to show: `count` of them from a position on, or one by its number in that pass."""

    at: int | None
    sample: int | None
    turn: int = 0
    count: int = 1


def inputs_of(
    target: str, overrides: list[str] | None = None, address: str | None = None
) -> tuple[TrainingInputs, Tokens, Source | None] | None:
    """The data of a job file or a run directory, its prepared shards, and the run that it continues, if any; None for
    a folder of prepared data. Data of a job file that is missing is prepared on Ray at `address`. Raises InputError."""
    from orchestrator.api.place import place_of
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.checkpoint.identity import read_job
    from orchestrator.cli.options import job_of, run_of
    from orchestrator.cli.prepared_job import prepared_job
    from orchestrator.data.progress import silent
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.models.continued import continuation_of
    from orchestrator.models.kept_config import kept_config
    from orchestrator.resolve.prepared_data import PreparedData, prepared, tokens_of
    from orchestrator.resolve.training_inputs import training_inputs
    from orchestrator.storage.run_directory import RunDir

    folder = place_of(target)
    _refuse_two_places(target, folder)
    if os.path.isfile(target) or (target.endswith((".yaml", ".yml")) and not os.path.exists(folder)):
        spec = job_of(Path(target), overrides)
        run = run_of(spec.name, None)
        try:
            data = prepared(spec, run, PreparedData(), silent, make=False)
        except Absent:
            data = prepared_job(Path(target), overrides, None, address)[1]
    else:
        run = RunDir(folder)
        stored = read_job(run)
        if stored is None or not run.holds_a_run():
            return None
        if overrides:
            raise InputError("a run keeps the data of its job", f"--set {overrides[0]}", "give the job file")
        spec = stored
        commit = Store(run.commits).latest(deep=False)
        if commit is not None:
            tokens = fully_prepared(tokens_of(spec.data, run, commit.meta["data"]))
            inputs = training_inputs(spec, tokens, folder_config=kept_config(commit))
            return inputs, tokens, continuation_of(spec).source(run)
        data = prepared(spec, run, PreparedData(), silent, make=False)
    tokens = Tokens.open(data.uri)
    return training_inputs(spec, tokens), tokens, continuation_of(spec).source(run)


def _refuse_two_places(target: str, run: str) -> None:
    """Raise InputError if a name means a run of the folder RUNS and also a file or a folder here: `run` is the run."""
    from orchestrator.config.paths import absolute
    from orchestrator.storage.file_names import RUNS

    if os.path.exists(target) and run != absolute(target, Path.cwd()):
        kind = "file" if os.path.isfile(target) else "folder"
        hint = f"write ./{target} or {RUNS}/{target}"
        raise InputError(f"is the name of a {kind} here and of a run in {RUNS}", target, hint)


def fully_prepared(tokens: Tokens) -> Tokens:
    """Prepared data that is all there. Raises InputError for some that is not: the rest would be waited for."""
    if tokens.sections is not None:
        problem = "is not all prepared, and how often a run reads it follows from all of it"
        raise InputError(
            problem, tokens.folder.uri, "wait for it, or make the rest with `orchestrator data prepare`"
        )
    return tokens


def describe(
    inputs: TrainingInputs, tokens: Tokens, continued: Source | None, wanted: Wanted
) -> dict[str, Any]:
    """The course of the run and the requested samples, as plain data. Raises InputError."""
    from orchestrator.data.samples.inspect import documents_cut
    from orchestrator.data.samples.mixture.passes import MANY
    from orchestrator.resolve.training_inputs import course_of

    spec, batches = inputs.job.spec, inputs.text[0]
    result: dict[str, Any] = {"name": spec.name, **course_of(inputs, spec.data, spec.train, continued)}
    for source in result["sources"]:
        source["too_often"] = source["passes"] > MANY
    windowing, streams = batches.read.objective.windowing, batches.read.streams
    if windowing.unit == "stream" and streams.manifest.format > 1:
        result |= documents_cut(streams, windowing, batches.packed)
    if batches.packed:
        size = min(len(batches.read), 10_000)
        result["padding"] = round(batches.padding(0, size), 6)
    if wanted.at is not None or wanted.sample is not None:
        decode = _decoder(tokens.tokenizer())
        result["samples"] = [
            _shown(inputs, spec.train, entry, decode)
            for entry in _entries(inputs, spec.train, continued, wanted)
        ]
    return result


def show(result: dict[str, Any]) -> None:
    """Print the result of `describe`: with colours on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for key in ("epochs", "mixture", "documents", "cut", "cut_though_short", "padding"):
        if key in result:
            console.print(Text(f"{key}: {result[key]}"))
    for number, source in enumerate(result["sources"]):
        many = "; more than 4 passes teach little" if source["too_often"] else ""
        console.print(
            Text(
                f"source {number} {source['uri']}: {source['samples']} samples, {source['passes']:g} passes by the end"
                + many
            )
        )
    for sample in result.get("samples", ()):
        location = "" if sample["position"] is None else f"position {sample['position']}, "
        location += "" if sample["step"] is None else f"step {sample['step']}, "
        pieces = ", ".join(f"{a} to {b}" for a, b in sample["pieces"])
        title = (
            f"{location}sample {sample['sample']} of source {sample['source']}, turn {sample['turn']}: "
            f"tokens {pieces}"
        )
        console.print(Text(title, style="bold"))
        for row in sample["rows"]:
            for name, pieces in row["shown"].items():
                text = Text(f"{name}: ")
                for part, kind in pieces:
                    text.append(part.replace("\n", "⏎"), STYLES[kind])
                console.print(text)
            for name, value in row["others"].items():
                console.print(Text(f"{name}: {value}"))


def _entries(
    inputs: TrainingInputs, train: TrainSpec, continued: Source | None, wanted: Wanted
) -> list[dict[str, Any]]:
    from orchestrator.data.samples.inspect import samples_at

    batches = inputs.text[0]
    if wanted.sample is None:
        positions = range(wanted.at or 0, (wanted.at or 0) + wanted.count)
        first = (
            (continued.commit.step, continued.first_position(train.continue_from)) if continued else (0, 0)
        )
        return samples_at(batches, positions, inputs.job.spec.reading, first)
    if wanted.sample not in batches.read:
        problem = f"no sample has the id {wanted.sample}; {len(batches.read)} are prepared"
        raise InputError(problem, "--sample", "list ids with --at POSITION")
    source, pieces = batches.read.origin(wanted.sample)
    entry = {"position": None, "step": None, "turn": wanted.turn, "sample": wanted.sample, "source": source}
    return [{**entry, "pieces": [[start, start + length] for start, length in pieces]}]


def _shown(inputs: TrainingInputs, train: TrainSpec, entry: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """A sample with its rows; a warm-up of the sequence length makes several rows of one sample."""
    from orchestrator.data.samples.inspect import answers_apart, other_entries, plain, spots
    from orchestrator.train.sequence_warmup import shortened

    read = inputs.text[0].read
    batch = read.collate([entry["sample"]], entry["turn"])
    length = None
    if read.objective.windowing.partial:
        length = read.length(entry["sample"]) - (
            read.objective.windowing.window - read.objective.windowing.stride
        )
    full_length, warmup = batch["tokens"].shape[1], train.sequence_warmup
    if warmup and entry["step"]:
        batch = shortened(batch, warmup.at(entry["step"] - 1, full_length))
    size, rows = batch["tokens"].shape[1], []
    is_causal = inputs.workload.config.architecture == "decoder"
    for row in range(len(batch["tokens"])):
        remaining = None if length is None else length - row * size
        marks: dict[str, list[Spot]] = spots(batch, row, decode, inputs.workload.vocabulary.eos, remaining)
        rows.append(
            {
                "tokens": {name: [spot.to_json() for spot in marked] for name, marked in marks.items()},
                "others": other_entries(batch, row),
                "shown": {
                    name: plain(marked, is_causal) for name, marked in answers_apart(marks, batch).items()
                },
            }
        )
    return {**entry, "rows": rows}


def _decoder(tokenizer: Tokenizer) -> Decode:
    """The text of a token. For a part of a character, its name in the vocabulary."""

    def decode(token: int) -> str:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        return (tokenizer.id_to_token(token) or f"<{token}>") if not text or "\ufffd" in text else text

    return decode

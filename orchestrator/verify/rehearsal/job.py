"""The job of a rehearsal: the user's job with few steps, a small model, little data and few ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.smoke import shorter
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.config import DataSpec, Source
from orchestrator.data.sources import SourceFile, cut, resolve
from orchestrator.data.sources.arrow_files import batches_in
from orchestrator.data.sources.dataset_card import write_card
from orchestrator.data.sources.documents import LOOK_BYTES
from orchestrator.data.sources.files import TABLES, Span, opened
from orchestrator.data.sources.json_rows import begins_list
from orchestrator.data.sources.listing import HIVE_NULL
from orchestrator.data.sources.plain import Plain
from orchestrator.data.sources.rows import Row, rows
from orchestrator.data.sources.table_rows import BATCH_ROWS, ERRORS, top_level
from orchestrator.parallel.layout import Layout, ModelShape, split_problems
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.verify.rehearsal.layouts import sequences_of, smaller
from workloads.model.small_config import narrow
from workloads.own.object_reference import is_object_reference

ENOUGH = 2 * 2**20
"""The approximate bytes of text that all sources of a list give together."""
LEAST = 2**17
"""The minimum bytes of text of each source."""


def excerpt(
    sources: Sequence[Source], where: str, on_error: str, folder: Path, enough: int = ENOUGH
) -> list[Source]:
    """Return sources with about `enough` bytes of the text of `sources`.

    A small file is read in place. The beginning of a larger one is copied to `folder`. `where` is the sources' key in
    the job file. Raises InputError if a source does not exist or cannot be read.
    """
    files = resolve(sources, where, on_error)
    each = max(enough // max(len(sources), 1), LEAST)
    found = []
    for number, source in enumerate(sources):
        places, left = [], each
        for file in (file for file in files if file.source == number):
            if left <= 0:
                break
            if file.plain_size <= left:
                places.append(file.uri)
                left -= file.plain_size
                continue
            if places:
                break
            above = [f"{quote(name)}={_of_folder(value)}" for name, value in file.folders.items()]
            target = folder.joinpath(*above) / f"{where}.{number}{_suffix(file)}"
            if file.labels:
                target = folder.joinpath(f"{where}.{number}", *above) / target.name
                write_card(str(folder / f"{where}.{number}"), file.labels)
            _beginning(file, left, target)
            places.append(str(target))
            break
        form = None if places and places[0].startswith(str(folder)) else source.format
        found.append(source.model_copy(update={"uri": places or source.uri, "format": form}))
    return found


def _of_folder(value: str | None) -> str:
    """Return a value in Hive's form for folder names."""
    return HIVE_NULL if value is None else quote(value, safe="")


def _suffix(file: SourceFile) -> str:
    if file.kind in TABLES:
        return ".parquet"
    return ".jsonl" if file.kind == ".tar" else file.kind


def _beginning(file: SourceFile, size: int, target: Path) -> None:
    """Write the beginning of a file to `target`.

    This is the first `size` bytes of plain text, up to the end of a line; the first rows of a table, with its schema's
    metadata; or the first rows of an archive or a JSON list, as lines.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if file.kind in TABLES:
            pq.write_table(_first_rows(file, size), target)
            return
        if file.kind == ".tar":
            target.write_text("".join(_lines(file, size)))
            return
        with opened(Span(file, 0, file.size, file.size)) as raw:
            handle = cast(BinaryIO, Plain(raw, file.compression)) if file.compression else raw
            text = b"".join(_read(handle, size))
        if file.kind == ".jsonl" and begins_list(text):
            target.write_text("".join(_lines(file, size)))
            return
        end = text.rfind(b"\n") + 1
        if file.kind in (".csv", ".tsv"):  # their cells may hold line breaks
            begins = itertools.takewhile(lambda at: at <= len(text), (row.at for row in _rows(file)))
            end = max(begins, default=0)
        target.write_bytes(text[:end] or text)
    except OSError as error:
        raise InputError(f"cannot be read ({error})", file.uri, "check its permissions") from None


def _first_rows(file: SourceFile, size: int) -> pa.Table:
    """Return the first rows of a table up to this size, with only the columns that are read. Raises InputError."""
    found = []
    with opened(Span(file, 0, file.size, file.size)) as raw:
        try:
            batches = (
                batches_in(raw) if file.kind == ".arrow" else pq.ParquetFile(raw).iter_batches(BATCH_ROWS)
            )
            for batch in batches:
                names = top_level(batch.schema.names, list(file.columns))
                rows = batch.num_rows if batch.nbytes <= size else batch.num_rows * size // batch.nbytes
                found.append(batch.select(names).slice(0, max(rows, 1)))
                size -= batch.nbytes
                if size <= 0:
                    break
            return pa.Table.from_batches(found)
        except ERRORS as error:
            what = f"cannot be read ({' '.join(str(error).split())[:200]})"
            raise InputError(what, file.uri, "write the file again") from None


def _read(handle: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (block := handle.read(min(size, 2**16))):
        size -= len(block)
        yield block


def _rows(file: SourceFile) -> Iterator[Row]:
    return (row for part in cut([file], LOOK_BYTES) for span in part for row in rows(span))


def _lines(file: SourceFile, size: int) -> Iterator[str]:
    """Yield the first rows of an archive or a list as lines of JSON, up to this size."""
    for row in _rows(file):
        line = json.dumps(dict(row.values), default=_plain) + "\n"
        yield line
        size -= len(line)
        if size <= 0:
            return


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


LARGEST = 8_000_000
"""The maximum number of parameters of a model that a rehearsal does not shrink."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers", "num_hidden_groups")  # fmt: skip
"""Names of the number of layers in transformers' configurations."""


@dataclass(frozen=True)
class SmallModel:
    """The changes to a job's workload, the remaining number of parameters, and the differences from the job, one line
    each.
    """

    changes: dict[str, Any]
    parameters: int
    notes: tuple[str, ...] = ()


def small_model(job: ResolvedJob, layout: Layout, folder: Path) -> SmallModel:
    """Return a version of the job's model that is small enough for CPUs, sharded as `layout` says.

    A small copy of a model in the Hugging Face format is written to `folder`. A model that is small already, the user's
    own, or one that needs the weights of another run is unchanged. Raises InputError if the model cannot be made small.
    """
    spec, asked = job.spec, job.spec.workload
    needs_weights = bool(asked.init_from) and (asked.adapter is not None or asked.objective in REFERENCED)
    if job.shape.parameters <= LARGEST or is_object_reference(asked.model) or needs_weights:
        return SmallModel({}, job.shape.parameters)
    notes = ["the weights of workload.init_from were not read"] if asked.init_from else []
    if asked.shrink:
        notes.append("workload.shrink was left out")
    found: dict[str, Any] = {"init_from": None, "grow": None, "shrink": None}
    if asked.model.startswith("hf:"):
        found |= {"model": f"hf:{folder}", "changes": {}}
        shape = _small_folder(job, layout, folder)
        notes.append("the weights of workload.model were random")
    else:
        config = job.model.as_transformer
        assert config is not None
        smaller = narrow(config, layout.tp, layout.stages, layout.ep)
        found["changes"] = asked.changes | smaller
        shape = model_shape(config.changed(smaller), spec.data.sequence_length)
        if asked.mup is not None:
            found["mup"] = None
            notes.append("workload.mup was left out")
    return SmallModel(found, shape.parameters, tuple(notes))


def _small_folder(job: ResolvedJob, layout: Layout, folder: Path) -> ModelShape:
    """Write a small copy of the model in a job's folder, with random weights. Return its sizes. Raises InputError."""
    import torch
    import transformers
    from transformers.utils import logging

    from workloads.describe import describe
    from workloads.hf.as_they_are.hf_class import auto_class, describe_hf_class
    from workloads.hf.check.small_copy import narrowings
    from workloads.hf.files.hf_config import FOLDER, read_hf_config

    asked, why = job.spec.workload, "it has no small copy"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = asked.model.removeprefix(FOLDER)
    for config in narrowings(read_hf_config(source, asked.changes)):
        _shallow(config, max(layout.stages, 2))
        config.problem_type = None  # its head is random, and predicts whatever the job trains
        if labels := job.spec.data.labels:
            config.id2label = dict(enumerate(labels))
        try:
            config.save_pretrained(folder)
            described = describe_hf_class(str(folder))
            if described.parameters() > 4 * LARGEST:
                why = f"its small copy has {described.parameters()} parameters"
                continue
            found = describe(
                f"{FOLDER}{folder}", {}, job.vocabulary_size, None, len(job.spec.data.labels) or None
            )
            shape = model_shape(found, job.spec.data.sequence_length)
            if problems := split_problems(layout, shape):
                why = problems[0]
                continue
            torch.manual_seed(job.spec.seed)
            kind = getattr(transformers, (config.architectures or [""])[0], None)
            made = kind(config) if kind else auto_class(described).from_config(config)
            made.save_pretrained(folder)
            return shape
        except Exception as error:  # each class fails in its own way on widths that it cannot have
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    raise InputError(
        f"cannot be tried in small ({why})", "workload.model", "try the job itself with run --smoke"
    )


def _shallow(config: Any, layers: int) -> None:
    """Reduce the number of layers in a transformers configuration, in nested ones, and in lists with one entry per
    layer.
    """
    from workloads.hf.files.hf_config import nested_configs

    for part in nested_configs(config):
        depths = {name: value for name in DEPTHS if type(value := vars(part).get(name)) is int}
        for name, value in list(vars(part).items()):
            if name in depths:
                setattr(part, name, min(value, layers))
            elif isinstance(value, list) and len(value) in depths.values() and len(value) > layers:
                setattr(part, name, _kinds(value, layers))


def _kinds(values: list[Any], count: int) -> list[Any]:
    """Return `count` entries that cover as many different values as possible."""
    different = list(dict.fromkeys(values)) if all(isinstance(v, str | int | float) for v in values) else []
    return [*different, *values][:count] if len(different) > 1 else values[:count]


STEPS = 5
"""The steps of a rehearsal: three, one in which a rank is killed, and one under another layout."""
HELD_OUT = 0.1
"""The minimum share of held-out documents, so that the few documents yield some."""
FLOPS = 5e10
"""The FLOPs of a step, on all ranks together: seconds on the cores of a laptop."""
SHORTEST = 128
"""The number of tokens below which sequences are not halved further."""
HOURS = 0.2
"""The hours after which a run of a rehearsal ends with a commit."""


@dataclass(frozen=True)
class Rehearsed:
    """The job of a rehearsal under its `layout`, and the parts of the user's job that it leaves out, one line each."""

    spec: JobSpec
    layout: Layout
    notes: tuple[str, ...]

    def under(self, layout: Layout) -> JobSpec:
        """Return the same run under another layout."""
        return parse({**self.spec.model_dump(mode="json"), **_ranks(self.spec.resources, layout)})


def rehearsed(job: ResolvedJob, layout: Layout, folder: Path) -> Rehearsed:
    """Return the small job, with data and model in `folder`.

    Raises InputError if the data cannot be read, or if the model cannot be made small.
    """
    spec, small = job.spec, smaller(layout)
    if small.offload != "none" and not _gpu(spec.resources):
        small = dataclasses.replace(small, offload="none")
    model = small_model(job, small, folder / "model")
    sequences = sequences_of(small, spec.train)
    document = _short(spec)
    document["workload"] |= model.changes
    document["distill"] = None  # a small student fits no teacher
    document["train"]["global_batch"] = sequences
    document["data"] |= _little(spec.data, folder)
    length = _length(job, small, model, sequences)
    document["data"]["sequence_length"] = length
    if length != spec.data.sequence_length or small.pp > 1 or small.cp > 1:
        document["train"]["sequence_warmup"] = None
    if document["evaluate"]:
        for name, each in document["evaluate"]["sets"].items():
            each["sources"] = _excerpt(
                spec.set_sources[name][1], f"evaluate.sets.{name}.sources", spec.data, folder
            )
    document |= _ranks(spec.resources, small)
    notes = [*model.notes, *_left_out(spec)]
    if model.changes:
        notes.insert(0, f"the model had {model.parameters:,} of {job.shape.parameters:,} parameters")
    if length != spec.data.sequence_length:
        notes.append(f"sequences had {length} of {spec.data.sequence_length} tokens")
    if small.world != layout.world:
        notes.append(f"there were {small.world} of {layout.world} ranks")
    return Rehearsed(parse(document, "the rehearsal"), small, tuple(notes))


def _short(spec: JobSpec) -> dict[str, Any]:
    """Return the job with few steps, a commit after each, and no effects beyond this machine."""
    document = shorter(spec.train, STEPS, spec.model_dump(mode="json"))
    document |= {
        "name": "rehearsal",
        "stop_when": None,
        "tune": None,
        "tracking": None,
        "sinks": None,
        "notify": None,
    }
    document["train"] |= {
        "steps": STEPS,
        "compile": spec.train.compile and _gpu(spec.resources),
        "thaw": {},
        "continue_from": None,
    }
    document["train"]["optimizer"]["groups"] = []  # they may name layers that the small model lacks
    if spec.prune is not None:
        document["prune"] = spec.prune.shortened(spec.train.steps, STEPS) | {"match": []}
    document["checkpoint"] |= {
        "every": 1,
        "keep": STEPS,
        "keep_every": None,
        "keep_best": False,
        "snapshot_every": None,
        **NO_EXPORT,
    }
    document["limits"] = {"hours": HOURS}
    if document["evaluate"]:
        document["evaluate"] |= {"batches": 2, "tasks": [], "where": "gang", "every": STEPS + 1}
        document["evaluate"] |= {"at_start": False, "at_end": False}
    return document


def _ranks(resources: ResourceSpec, layout: Layout) -> dict[str, Any]:
    """Return the keys of a job for that layout on this machine."""
    gpu = _gpu(resources)
    worker: dict[str, Any] = {"cpu": 1, "gpu": resources.per_worker.gpu if gpu else 0, "labels": {}}
    return {
        "parallel": layout.pins,
        "resources": {"workers": layout.world, "per_worker": worker, "must_fit": False},
    }


def _gpu(resources: ResourceSpec) -> bool:
    """Return whether the job wants GPUs and this machine has some."""
    if not resources.per_worker.gpu:
        return False
    import torch

    return torch.cuda.is_available()


def _little(data: DataSpec, folder: Path) -> dict[str, Any]:
    """Return the keys of `data` that make it small."""
    found: dict[str, Any] = {"cache": str(folder / "data")}
    if data.samples is not None:
        return found
    found["sources"] = _excerpt(data.sources, "data.sources", data, folder)
    held_out = data.validation
    if held_out is not None:
        sources = _excerpt(held_out.sources, "data.validation.sources", data, folder)
        share = held_out.share and max(held_out.share, HELD_OUT)
        found["validation"] = {"share": share} if share else {"sources": sources}
    return found


def _excerpt(sources: Sequence[Source], where: str, data: DataSpec, folder: Path) -> list[dict[str, Any]]:
    found = excerpt(sources, where, data.on_error, folder / "text") if sources else []
    return [source.model_dump(mode="json") for source in found]


def _length(job: ResolvedJob, layout: Layout, model: SmallModel, sequences: int) -> int:
    """Return the tokens of a sequence: as in the job, or halved until a step takes seconds."""
    length = job.spec.data.sequence_length
    if job.spec.data.samples is not None:
        return length
    parts = 2 * layout.cp * layout.tp
    while (
        length % 2 == 0
        and length // 2 >= SHORTEST
        and length // 2 % parts == 0
        and 6.0 * model.parameters * length * sequences > FLOPS
    ):
        length //= 2
    return length


def _left_out(spec: JobSpec) -> list[str]:
    """Return the parts of the job that the rehearsal does not try, one line each."""
    found = []
    if spec.resources.per_worker.gpu and not _gpu(spec.resources):
        found.append("ranks had CPUs instead of GPUs")
        if spec.train.compile:
            found.append("train.compile was false")
    if spec.train.optimizer.groups:
        found.append("train.optimizer.groups were left out")
    if spec.evaluate and spec.evaluate.tasks:
        found.append("evaluate.tasks were not run")
    if spec.train.continue_from:
        found.append("the commit of train.continue_from was not read")
    if spec.distill:
        found.append("the teacher of distill was left out")
    if spec.tracking or spec.sinks or spec.notify:
        found.append("nothing was sent to tracking, sinks or notify")
    return found

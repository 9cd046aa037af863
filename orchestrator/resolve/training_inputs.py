"""The inputs of a run: the workload over the vocabulary of prepared data, its batches, and its held-out sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.config import Source as DataSource
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.data.store.manifest import FORMAT
from orchestrator.evaluate.config import VALIDATION
from orchestrator.models.base import Base, pruned_notes, tokenizer_notes, weights_of
from orchestrator.models.base_text import with_text_of_base
from orchestrator.models.continued import Source, check_same_data
from orchestrator.models.teacher_weights import check_tokens
from orchestrator.resolve.chat import chat_of, unclosed
from orchestrator.resolve.prepared_data import EARLIER, PreparedData, prepared
from orchestrator.resolve.prompts import Prompts, prompts_of, settings_notes
from orchestrator.resolve.resolved_job import ResolvedJob, adapter_of, is_framed, resolve, wrong_input
from orchestrator.storage.retry import Retry
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import Reading, TrainSpec
from workloads.hf.files.hf_config import FolderConfig
from workloads.hf.files.meaning import BY_NAME

if TYPE_CHECKING:
    from orchestrator.data.samples.batches import Batches
    from orchestrator.data.samples.held_out_set import HeldOut
    from orchestrator.data.samples.held_out_split import Split
    from orchestrator.data.samples.own_samples import OwnBatches, OwnHeldOut
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.samples.sections.plan import SectionPlan
    from orchestrator.data.samples.windows import Streams
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.parallel.layout import ModelShape
    from workloads.describe import Description
    from workloads.load import Begin
    from workloads.workload import Objective, Vocabulary, Workload


@dataclass(frozen=True)
class TrainingInputs:
    """The inputs of training: `job` resolved over the data, the workload, the batches of any step, the held-out sets
    by name, and the prompts of samples. Every rank builds the same.
    """

    job: ResolvedJob
    workload: Workload
    batches: Batches | OwnBatches
    sets: Mapping[str, HeldOut | OwnHeldOut]
    prompts: Prompts | None = None

    @property
    def class_weights(self) -> tuple[float, ...]:
        """Return the class weights that were counted in the records of training; empty unless the job asks for that."""
        return counted_weights(self.job.spec.workload, self.workload)

    @property
    def text(self) -> tuple[Batches, Mapping[str, HeldOut]]:
        """Return the batches and sets of a job on text. Raises InputError if its samples are the user's own."""
        if self.job.spec.data.samples is not None:
            raise InputError("own samples are not text", "data.samples", "look at them in Python")
        return cast("Batches", self.batches), cast("Mapping[str, HeldOut]", self.sets)


def training_inputs(
    spec: JobSpec,
    tokens: Tokens,
    sets: Mapping[str, str] | None = None,
    base: Base | None = None,
    folder_config: FolderConfig | None = None,
) -> TrainingInputs:
    """Return what the job trains on, and what it evaluates.

    Args:
        spec: the job.
        tokens: the prepared data of its sources, held-out documents included.
        sets: URIs of the prepared data of sets with separate text. Missing sets are left out.
        base: the initial weights.
        folder_config: the pretrained folder's configuration that the run has kept; None to read the folder.

    Raises InputError if training or a set has no sample, if they do not fit, or if a prompt cannot be continued.
    """
    from orchestrator.data.samples import batches
    from orchestrator.data.samples.held_out_set import split_set
    from orchestrator.data.samples.mixture.shares import Mixture

    job = resolve(spec, tokens.manifest.vocabulary, folder_config)
    workload = workload_of(
        workload=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        tokens=tokens,
        model=job.model,
        base=base,
        folder_config=job.folder_config,
    )
    _check_ends(workload.objective, tokens)
    if spec.data.samples is not None:
        return _own_sample_inputs(job, workload, tokens)
    weights = [source.weight for source in spec.data.sources]
    share = spec.data.validation.share if spec.data.validation else None
    plan, parts, trained = _divided(spec.data, tokens)
    mixture = Mixture.of(spec.data, spec.reading, spec.train.steps)
    routed = bool(workload.config.moe)
    workload = _weighed(workload, trained, spec.data.streaming)
    made = batches.batches_of(
        trained,
        workload.objective,
        seed=spec.seed,
        weights=weights,
        mixture=mixture,
        packed=is_packed(spec.data),
        routed=routed,
        plan=plan,
        share=share,
    )
    held_out = _own_sets(spec.set_sources, tokens, workload.objective, sets or {})
    if parts and spec.evaluate:
        held_out = {VALIDATION: split_set(parts, workload.objective), **held_out}
    return TrainingInputs(job, workload, made, held_out, prompts_of(job, workload, tokens))


def _divided(data: DataSpec, tokens: Tokens) -> tuple[SectionPlan | None, Split | None, Streams]:
    """Return the sections of streamed data, the two parts of data with held-out text, and what is trained on."""
    from orchestrator.data.samples.held_out_split import split
    from orchestrator.data.samples.sections.documents import SectionDocuments

    share = data.validation.share if data.validation else None
    plan = plan_of(data, tokens)
    parts = None
    # held-out text must be complete when training begins, so it comes from the first section
    if share and plan:
        parts = split(SectionDocuments(tokens, plan, 0), share, of=" of the first section")
    elif share:
        parts = split(tokens, share)
    return plan, parts, parts.training if parts and not plan else tokens


def counted_weights(spec: WorkloadSpec, workload: Workload) -> tuple[float, ...]:
    """Return the class weights of a workload of `TrainingInputs`, if they were counted; empty otherwise."""
    class_weights: Any = getattr(workload.objective, "class_weights", ())
    return (
        class_weights
        if spec.options.get("class_weights") == "balanced" and isinstance(class_weights, tuple)
        else ()
    )


def weights_of_data(
    spec: WorkloadSpec, data: DataSpec, tokens: Tokens, workload: Workload
) -> tuple[float, ...]:
    """Return the class weights that training counts in its data; empty unless the job asks for that.

    Args:
        spec: the job's model and objective.
        data: its data.
        tokens: the prepared data of its sources.
        workload: its workload.

    Raises InputError if the data lacks a label.
    """
    return counted_weights(spec, _weighed(workload, _divided(data, tokens)[2], data.streaming))


def _weighed(workload: Workload, tokens: Streams, streams: bool) -> Workload:
    """Return the workload with class weights counted in the records of training, if the job asks for that."""
    objective: Any = workload.objective
    if getattr(objective, "class_weights", ()) != "balanced":
        return workload
    if streams:
        raise InputError(
            "balanced needs the counts of all records, but data.streaming prepares them during training",
            "workload.options.class_weights",
            "give a weight for each label, or leave data.streaming out",
        )
    from orchestrator.data.samples.sample_reader import SampleReader
    from orchestrator.data.samples.windows import windows_of
    from workloads.errors import WorkloadError
    from workloads.objectives.supervised import balanced

    windows = [windows_of(tokens, source, objective.windowing) for source in range(tokens.sources)]
    read = SampleReader(tokens, windows, objective)
    try:
        counted = balanced(objective, (read(number) for number in range(len(read))))
    except WorkloadError as error:
        raise InputError(
            str(error), "workload.options.class_weights", "give a weight for each label"
        ) from None
    return replace(cast(Any, workload), objective=counted)


def _check_ends(objective: Objective, tokens: Tokens) -> None:
    """Raise InputError if an objective would mistake a token within a text for its end."""
    count = tokens.manifest.inner_ends
    if not count or getattr(objective, "documents", "pack") != "isolate":
        return
    name = tokens.tokenizer().id_to_token(tokens.manifest.roles["eos"])
    problem = f"separates documents by {name}, which also appears {count} times within texts"
    hint = "set documents to pack, or data.special_tokens to text"
    raise InputError(problem, "workload.options.documents", hint)


def _own_sample_inputs(job: ResolvedJob, workload: Workload, tokens: Tokens) -> TrainingInputs:
    """Return the inputs of a job on own samples. Raises InputError."""
    from orchestrator.data.samples.own_samples import batches_of_samples

    spec = job.spec
    assert spec.data.samples is not None
    share = spec.data.validation.share if spec.data.validation else None
    batches, held_out = batches_of_samples(
        spec.data.samples, spec.seed, share, tokens.manifest, tokens.folder.uri
    )
    available = len(batches.numbers)
    compared = spec.train.global_batch
    if getattr(workload, "compares", False) and available < compared:
        problem = (
            f"{compared} samples are compared with each other, but there are only {available} to train on"
        )
        raise InputError(problem, "train.global_batch", "lower it: a sample would be compared with itself")
    return TrainingInputs(
        job, workload, batches, {VALIDATION: held_out} if held_out and spec.evaluate else {}
    )


def _own_sets(
    held_out: Mapping[str, tuple[str, Sequence[DataSource]]],
    tokens: Tokens,
    objective: Objective,
    sets: Mapping[str, str],
) -> dict[str, HeldOut]:
    """Return those of the `sets` that have separate text."""
    from orchestrator.data.samples.held_out_set import set_of
    from orchestrator.data.store.tokens import Tokens as Prepared

    return {
        name: set_of(Prepared.open(sets[name], tokens.folder.retry, tokens.keep), objective, where)
        for name, (where, _) in held_out.items()
        if name in sets
    }


def resolve_over(
    spec: JobSpec,
    data: PreparedData,
    base: Base | None = None,
    source: Source | None = None,
    folder_config: FolderConfig | None = None,
) -> tuple[ResolvedJob, str, list[str]]:
    """Resolve the job over its prepared data. Return it with the digest of the training shards and notes for the
    user.

    Raises InputError if training or a set has no sample, or if they do not fit.
    """
    from orchestrator.data.prepare import rejections
    from orchestrator.data.samples.mixture import passes
    from orchestrator.data.store.tokens import Tokens

    tokens = Tokens.open(data.uri, keep=0)
    inputs = training_inputs(spec, tokens, data.sets, base, folder_config)
    complete = (
        tokens.sections is None
    )  # for streamed data the amount of text is unknown until all is prepared
    if spec.data.samples is None and complete:
        passes.check_length(inputs.text[0].order, _positions(spec.train, spec.reading, source))
    notes = [*inputs.job.notes, *inputs.workload.notes, *(_cut_notes(inputs) if complete else ())]
    if spec.evaluate and (spec.evaluate.samples or spec.evaluate.tasks):
        notes += settings_notes(spec.workload.model)
    notes += rejections.notes_of(data.uri, *data.sets.values())
    notes += (
        unclosed(chat_of(spec.data, spec.workload.objective, tokens)) if spec.data.samples is None else []
    )
    if spec.data.is_mixed and complete:
        notes += passes.notes(course_of(inputs, spec.data, spec.train, source))
    if spec.distill:
        check_tokens(spec.distill.teacher, spec.workload, tokens.tokenizer())
    weights = source.base if source else base
    notes += pruned_notes(weights) if weights and spec.prune is None else []
    is_text = spec.data.samples is None
    notes += tokenizer_notes(weights, tokens.tokenizer()) if weights and is_text else []
    digest = digest_of(spec.data, tokens)
    if source:
        check_same_data(spec.train, source, digest, data.uri)
    job = inputs.job.with_rows(_row_tokens(inputs, tokens))
    return job, digest, [*notes, *_set_notes(spec.data, tokens, data.sets)]


def _row_tokens(inputs: TrainingInputs, tokens: Tokens) -> tuple[tuple[int, float], ...]:
    """Return the `row_tokens` of a job's model shape; empty unless rows are cut to samples that are all prepared."""
    from orchestrator.parallel.layout import Layout
    from orchestrator.resolve.row_lengths import lengths_of, mean_row_tokens

    spec = inputs.job.spec
    if spec.data.samples is not None or spec.rollout is not None or tokens.sections is not None:
        return ()
    batches = inputs.text[0]
    lengths = lengths_of(
        inputs.workload,
        Layout(),
        spec.train,
        on_gpu=spec.resources.per_worker.gpu > 0,
        packed=batches.packed,
        has_means=spec.distill is not None and spec.distill.looks_inside,
    )
    return mean_row_tokens(batches, lengths, spec.train, spec.data.sequence_length, draws=spec.workload.draws)


def prepared_rows(
    spec: JobSpec, run: RunDir, folder_config: FolderConfig | None
) -> tuple[tuple[int, float], ...]:
    """Return the `row_tokens` of a job's model shape by its prepared data; empty if that data is not there.

    Args:
        spec: the job.
        run: its run directory.
        folder_config: the pretrained folder's configuration that the run has kept; None to read the folder.
    """
    from orchestrator.data.progress import silent
    from orchestrator.data.store.tokens import Tokens

    if not spec.has_varied_rows:
        return ()
    try:
        data = prepared(spec, run, PreparedData(), silent, make=False)
        tokens = Tokens.open(data.uri, keep=0)
        inputs = training_inputs(spec, tokens, folder_config=folder_config)
    except InputError:
        return ()
    return _row_tokens(inputs, tokens)


class Beginning(NamedTuple):
    """The origin of a run: the base of its weights, and the run that it continues. A run without one has None there."""

    base: Base | None
    source: Source | None


class ShapeOfData(NamedTuple):
    """The values that a controller needs from a job, resolved over its data.

    Attributes:
        shape: the model's sizes.
        folder_config: the configuration of a pretrained folder to keep; None without one.
        shards: the digest of the token shards.
        notes: for the user.
    """

    shape: ModelShape
    folder_config: FolderConfig | None
    shards: str
    notes: list[str]


def shape_over(
    spec: JobSpec,
    data: PreparedData,
    beginning: Beginning,
    folder_config: FolderConfig | None,
) -> ShapeOfData:
    """Return the parts of `resolve_over` that a controller needs.

    `resolve_over` imports torch, so this runs in another process, which gets positional arguments.
    """
    job, digest, notes = resolve_over(spec, data, beginning.base, beginning.source, folder_config)
    return ShapeOfData(job.shape, job.folder_config, digest, notes)


def plan_of(data: DataSpec, tokens: Tokens) -> SectionPlan | None:
    """Return the sections that the job's epochs go through; None without sections. Raises InputError if they are
    unknown.
    """
    from orchestrator.data.samples.sections.plan import SectionPlan

    if data.shuffle != "sections":
        return None
    if plan := SectionPlan.read(tokens.folder):
        return plan
    hint = "prepare the data again"
    raise InputError("lacks the plan of its sections", tokens.folder.uri, hint)


def digest_of(data: DataSpec, tokens: Tokens) -> str:
    """Return a digest that identifies the job's token shards.

    With sections, some of which may not exist yet, it covers everything that determines them.
    """
    manifest_of_data = tokens.manifest
    return (
        f"sections-{manifest_of_data.fingerprint}" if data.shuffle == "sections" else manifest_of_data.digest
    )


def check_digest(data: DataSpec, tokens: Tokens, expected: str, uri: str) -> None:
    """Raise InputError if the token shards at `uri` have another digest than the `expected` one; empty for any."""
    if expected not in ("", digest_of(data, tokens)):
        problem = "these token shards differ from the run's (checksum)"
        raise InputError(problem, uri, "put data.cache on storage that all nodes share")


def is_packed(data: DataSpec) -> bool:
    """Return whether the job's samples are packed by best fit."""
    return data.packing == "best_fit"


def course_of(
    inputs: TrainingInputs, data: DataSpec, train: TrainSpec, source: Source | None = None
) -> dict[str, Any]:
    """Return how often the run reads each source, see `orchestrator.data.samples.mixture.passes.course`.

    A run that continues a `source` run includes what that run has read, if it keeps the position.
    """
    from orchestrator.data.samples.mixture.passes import course

    uris = [source.name for source in data.sources]
    reading = inputs.job.spec.reading
    return course(inputs.text[0].order, uris, reading, _positions(train, reading, source))


def _positions(train: TrainSpec, reading: Reading, source: Source | None) -> int:
    """Return how many samples of its data a run has read at its end."""
    first, first_step = (source.first_position(train.continue_from), source.commit.step) if source else (0, 0)
    return first + reading.samples_before(train.steps) - reading.samples_before(first_step)


def _cut_notes(inputs: TrainingInputs) -> list[str]:
    """Return one line if records are longer than a sample: how many, and how many lose everything that is predicted.

    Raises InputError if all of them do.
    """
    objective = inputs.workload.objective
    if not objective.windowing.unit.startswith("record"):
        return []
    if rollout := inputs.job.spec.rollout:
        return _cut_prompts(inputs.text[0].read, objective.windowing.window - rollout.max_tokens)
    read = inputs.text[0].read
    shortest = objective.windowing.window // 2
    length = objective.windowing.window
    cut_texts = [words for words in map(read, read.longer_than(shortest)) if objective.is_cut(words)]
    if not cut_texts:
        return []
    lost = sum(map(objective.is_lost, cut_texts))
    streams = read.streams
    ends = (part for source in range(streams.sources) for part in streams.document_ends_by_part(source))
    every = sum(map(len, ends))  # a sample may hold several records
    if lost == every:
        problem = (
            f"all records are longer than {length} tokens, and cutting removes everything that is predicted"
        )
        raise InputError(problem, "data.sequence_length", "raise it")
    line = f"{len(cut_texts)} of {every} records are longer than {length} tokens and are cut"
    return [line + (f"; {lost} of them keep nothing that is predicted" if lost else "")]


def _cut_prompts(read: SampleReader, room: int) -> list[str]:
    """Return one line if prompts are longer than `room`, which answers leave of a row."""
    from workloads.record_format import unpack

    long = sum(len(unpack(words)[0]) > room for words in map(read, read.longer_than(room)))
    if not long:
        return []
    return [
        f"{long} of {len(read)} prompts are longer than {room} tokens, which rollout.max_tokens leaves of "
        "data.sequence_length, and keep their end"
    ]


def _set_notes(data: DataSpec, tokens: Tokens, sets: Mapping[str, str]) -> list[str]:
    """Return one line for each set that shares documents with the training text. Data before format 3, and incomplete
    data, cannot be compared.
    """
    from orchestrator.data.samples.held_out_split import trained_documents
    from orchestrator.data.store.tokens import Tokens as Prepared

    notes = []
    share = data.validation and data.validation.share
    comparable = tokens.manifest.format > 2 and tokens.sections is None
    for name, uri in sets.items() if comparable else ():
        held_out = Prepared.open(uri, keep=0)
        count = trained_documents(tokens, held_out, share or 0.0)
        documents = held_out.manifest.documents
        if count:
            notes.append(
                f"{count} of the {documents} documents of the set {name} are also in the training text"
            )
    return notes


def workload_of(
    workload: WorkloadSpec,
    data: DataSpec,
    train: TrainSpec,
    seed: int,
    tokens: Tokens,
    model: Description | None = None,
    base: Base | None = None,
    folder_config: FolderConfig | None = None,
) -> Workload:
    """Return the workload over the vocabulary of prepared data. Raises InputError."""
    vocabulary = no_vocabulary() if data.samples is not None else tokens.vocabulary()
    return load_workload(
        workload,
        data,
        train,
        seed,
        vocabulary,
        data_format=tokens.manifest.format,
        model=model,
        base=base,
        retry=tokens.folder.retry,
        folder_config=folder_config,
    )


def load_workload(
    spec: WorkloadSpec,
    data: DataSpec,
    train: TrainSpec,
    seed: int,
    vocabulary: Vocabulary,
    data_format: int,
    model: Description | None = None,
    base: Base | None = None,
    retry: Retry | None = None,
    folder_config: FolderConfig | None = None,
) -> Workload:
    """Return the job's workload over a vocabulary, for prepared data of that format.

    Args:
        spec: the job's model.
        data: the job's data.
        train: how the job trains.
        seed: the seed of the run.
        vocabulary: the vocabulary.
        data_format: format of the prepared data.
        model: the resolved description of the model, if known.
        base: the initial weights; None for random weights, even if the job has workload.init_from.
        retry: how to retry reads.
        folder_config: the pretrained folder's configuration that the run has kept; None to read the folder.

    Raises InputError.
    """
    from workloads.adapters.frozen import frozen_by, thawed_after
    from workloads.hf.tables.our_names import in_our_names
    from workloads.load import load

    dropout, attention_dropout = spec.dropouts
    with wrong_input("workload"):
        workload = load(
            spec.model,
            spec.objective,
            vocabulary,
            changes=spec.changes,
            options=spec.options,
            mup=spec.mup,
            dropout=dropout,
            attention_dropout=attention_dropout,
            layer_drop=spec.layer_drop,
            embedding_noise=spec.embedding_noise,
            head_gates=spec.head_penalty > 0.0,
            sequence_length=data.sequence_length,
            seed=seed,
            rule=data_format,
            described=model,
            labels=data.labels,
            begin=_begin(base, spec, data.labels, retry, data_format),
            adapter=adapter_of(spec),
            implementation=spec.implementation,
            kept=folder_config,
        )
        if base and spec.init_from and data_format >= BY_NAME:
            workload = with_text_of_base(workload, spec, base, retry)
    described = getattr(workload, "config", None)
    with wrong_input("train.freeze"), in_our_names(described):
        frozen = workload.frozen | frozen_by(train.freeze, workload)
    with wrong_input("train.thaw"), in_our_names(described):
        return replace(workload, frozen=frozen, thawed_after=thawed_after(train.thaw, frozen))


def _begin(
    base: Base | None, spec: WorkloadSpec, labels: Sequence[str], retry: Retry | None, data_format: int
) -> Begin | None:
    """Return what reads the initial weights; None to begin with those of the model's folder, or with random ones."""
    if base and (spec.init_from or spec.shrink):
        return weights_of(base, spec, labels, retry, data_format)
    if spec.shrink is None or spec.init_from:
        return None
    from workloads.model.stored import NONE

    return lambda *_: NONE  # the folder has the weights of a larger model


def no_vocabulary() -> Vocabulary:
    """Return the vocabulary of own samples, which are not text."""
    from workloads.workload import Vocabulary

    return Vocabulary(1, 0)


def vocabulary_before_data(job: ResolvedJob, data_format: int = FORMAT) -> Vocabulary:
    """Return the part of the vocabulary that is known before the data of that format exists."""
    if job.spec.data.samples is not None:
        return no_vocabulary()
    import numpy as np
    from tokenizers import Tokenizer

    from orchestrator.data.encoding import tokenizer, training
    from orchestrator.data.encoding.vocabulary import first_added, frame_of
    from workloads.workload import Vocabulary

    size = job.vocabulary_size
    source = job.spec.data.tokenizer
    if isinstance(source, TrainedTokenizer):
        training.check_size(source.recipe, job.special_tokens)
        text = training.train_bytes((), size, job.special_tokens)
        roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
    else:
        text, roles = tokenizer.load(source, job.special_tokens, job.spec.data.add_tokens, data_format)
    made = Tokenizer.from_str(text)
    sentinels = tokenizer.sentinels(made)
    anywhere = np.ones(size, bool)
    fields: dict[str, Any] = {role: number for role, number in roles.items() if role != "unk"}
    fields |= {"added": first_added(made, size), "frame": frame_of(made)}
    is_new = data_format > EARLIER and not isinstance(source, TrainedTokenizer)
    if is_new and is_framed(job.spec.data, job.spec.workload):
        fields["before"] = tokenizer.around_text(made)[0]
    return Vocabulary(size, **fields, sentinels=tuple(sentinels), word_start=anywhere, sentence_end=anywhere)

"""From the job file's words to parts: data, workload, batches, and the sizes that planning needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, TrainBpe
from orchestrator.planning.layout import ModelShape
from orchestrator.planning.plan import model_shape
from orchestrator.storage.retry import Retry, storage_failed
from orchestrator.storage.run_directory import RunDir
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from orchestrator.data.batches import Batches
    from orchestrator.data.tokens import Tokens
    from orchestrator.storage.retry import Retry
    from workloads.workload import Vocabulary, Workload


EXCERPT = "excerpt"
"""Where a run directory has a little of its data."""


def data_cache(spec: JobSpec, run: RunDir) -> str:
    """Where token shards are kept: named by the job, else beside the runs, so that all of them share it."""
    return spec.data.cache or f"{run.uri.rsplit('/', 1)[0]}/_data"


def prepare(spec: JobSpec, run: RunDir, tell: Callable[[str, int, int], None]) -> str:
    """The URI of the job's token shards, made now unless they are there. Raises InputError."""
    from orchestrator.data.prepare import prepare as prepare_data

    return prepare_data(spec.data, _special_tokens(spec), data_cache(spec, run), tell)


def prepared(spec: JobSpec, run: RunDir, before: str, tell: Callable[[str, int, int], None]) -> str:
    """The data that the run began with at `before`, made again as far as it is gone; the job's, for a run that begins.

    Raises InputError if it is gone and the text is no longer the same: the run would not be the same run.
    """
    from orchestrator.data.files import Folder
    from orchestrator.data.shards import is_whole

    if before and is_whole(Folder(before)):
        return before
    from orchestrator.data.prepare import prepare as prepare_data

    name = before.rstrip("/").rsplit("/", 1)[-1]
    return prepare_data(spec.data, _special_tokens(spec), data_cache(spec, run), tell, before=name)


def is_whole(data: str) -> bool:
    """Whether the files of prepared data are all there; of data on a store, which ranks copy, it is not asked."""
    from orchestrator.data.files import Folder
    from orchestrator.data.shards import is_whole as whole

    folder = Folder(data)
    return not folder.local or whole(folder)


def keep_excerpt(run: RunDir, data: str) -> None:
    """Put a little of the data into the run directory, for what comes when the data may be gone; none if that fails."""
    from orchestrator.data.excerpt import keep

    try:
        keep(data, run.at(EXCERPT))
    except Exception as error:
        if not storage_failed(error):
            raise


def data_of(run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """Prepared data at `data`, or the run's excerpt of it where that is gone. Raises InputError."""
    from orchestrator.data.files import Folder
    from orchestrator.data.shards import is_whole as whole
    from orchestrator.data.tokens import Tokens

    kept = run.at(EXCERPT)
    gone = not whole(Folder(data, retry)) and whole(Folder(kept, retry))
    return Tokens.open(kept if gone else data, retry)


def tokens_of(spec: JobSpec, run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """The prepared data that a commit of the run names: where it was, or in the cache that the run has now, since both
    may have been moved.

    Raises InputError if it is in neither.
    """
    from orchestrator.data import manifest
    from orchestrator.data.files import Folder
    from orchestrator.data.tokens import Tokens

    for place in (data, f"{data_cache(spec, run)}/{data.rsplit('/', 1)[-1]}"):
        if manifest.read(Folder(place, retry)):
            return Tokens.open(place, retry)
    hint = f"make it again with `orchestrator data prepare {run.at('job.yaml')} --run-dir {run.uri}`"
    raise InputError("the prepared data of this run is gone", data, hint)


def workload_of(spec: JobSpec, tokens: Tokens) -> Workload:
    """The workload over the vocabulary of prepared data. Raises InputError."""
    return _load(spec, tokens.vocabulary(), tokens.manifest.format)


def _load(spec: JobSpec, vocabulary: Vocabulary, rule: int) -> Workload:
    from workloads.load import load

    try:
        return load(
            spec.workload.model,
            spec.workload.objective,
            vocabulary,
            changes=spec.workload.changes,
            options=spec.workload.options,
            mup=spec.workload.mup,
            dropout=spec.workload.dropout,
            sequence_length=spec.data.sequence_length,
            seed=spec.seed,
            rule=rule,
        )
    except WorkloadError as error:
        raise InputError(str(error), "workload") from None


def batches_of(spec: JobSpec, tokens: Tokens, workload: Workload) -> Batches:
    """The batches of the job over prepared data. Raises InputError if it holds not one sample."""
    from orchestrator.data import batches

    weights = [source.weight for source in spec.data.sources]
    return batches.batches_of(tokens, workload.objective, spec.seed, weights)


def shape_of(spec: JobSpec, vocabulary: int) -> ModelShape:
    """The model's sizes for a vocabulary of that many tokens. Raises InputError."""
    from workloads.describe import describe

    try:
        return model_shape(
            describe(spec.workload.model, spec.workload.changes, vocabulary), spec.data.sequence_length
        )
    except WorkloadError as error:
        raise InputError(str(error), "workload") from None


def check_objective(spec: JobSpec) -> None:
    """Refuse an unknown objective, or one that the model's architecture cannot train. Raises InputError."""
    from workloads import objectives
    from workloads.describe import describe

    name = spec.workload.objective
    try:
        fits = objectives.architectures(name)
        config = describe(spec.workload.model, spec.workload.changes, objective=name)
    except WorkloadError as error:
        raise InputError(str(error), "workload") from None
    if config.architecture not in fits:
        known = [n for n in objectives.NAMES if config.architecture in objectives.architectures(n)]
        what = f"{name} does not train {spec.workload.model}, which is a {config.architecture}"
        raise InputError(what, "workload.objective", f"choose from {', '.join(known)}")
    for number, source in enumerate(spec.data.sources):
        if objectives.reads_pairs(name) and isinstance(source.field, str):
            hint = "give two keys, those of the text and of its translation"
            raise InputError(f"{name} reads pairs", f"data.sources.{number}.field", hint)


def check_workload(spec: JobSpec) -> None:
    """Refuse what model, objective, options, sequence length and tokenizer cannot do together, before there is data.

    An export that could not be written is refused too. What only the text decides is left open: which tokens begin a
    word or end a sentence. Raises InputError.
    """
    import numpy as np
    from tokenizers import Tokenizer

    from orchestrator.data import tokenizer
    from orchestrator.data.manifest import FORMAT
    from workloads.hf.folder import HuggingFaceModel
    from workloads.workload import Vocabulary

    size, special = vocabulary_size(spec), _special_tokens(spec)
    if isinstance(spec.data.tokenizer, TrainBpe):
        tokenizer.check_size(size, special)
        text = tokenizer.train((), size, special)
        roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
    else:
        text, roles = tokenizer.load(spec.data.tokenizer, special)
    sentinels, anywhere = tokenizer.sentinels(Tokenizer.from_str(text)), np.ones(size, bool)
    known: dict[str, Any] = {role: number for role, number in roles.items() if role != "unk"}
    vocabulary = Vocabulary(
        size, **known, sentinels=tuple(sentinels), word_start=anywhere, sentence_end=anywhere
    )
    workload = _load(spec, vocabulary, FORMAT)
    if spec.checkpoint.export:
        try:
            workload.check_hf()
        except WorkloadError as error:
            raise InputError(str(error), "checkpoint.export") from None
    if isinstance(workload.config, HuggingFaceModel):
        _check_foreign(spec, workload)


def _check_foreign(spec: JobSpec, workload: Any) -> None:
    """Refuse a class run as it is that does not compute what the job says. Raises InputError."""
    from workloads.hf.behaviour import prove

    try:
        prove(workload)
    except WorkloadError as error:
        raise InputError(str(error), "workload") from None
    if spec.train.compile and not workload.config.has_blocks:
        raise InputError(
            f"{spec.workload.model} has no layers that could be compiled alone",
            "train.compile",
            "set it to false",
        )


def notes_of(spec: JobSpec) -> list[str]:
    """What is trained otherwise than a folder's configuration says, in words. Raises InputError."""
    from workloads.describe import describe
    from workloads.hf.folder import HuggingFaceModel

    config = describe(spec.workload.model, spec.workload.changes)
    if not isinstance(config, HuggingFaceModel) or not config.silenced:
        return []
    names = ", ".join(config.silenced)
    rate = spec.workload.dropout
    instead = f"workload.dropout {rate:g} is drawn by sample" if rate else "workload.dropout would not"
    return [
        f"{spec.workload.model} is trained without {names}: what a class draws at random depends on the layout; "
        f"{instead}"
    ]


def vocabulary_size(spec: JobSpec) -> int:
    """Entries of the job's tokenizer, known before any data is prepared. Raises InputError."""
    if isinstance(spec.data.tokenizer, TrainBpe):
        return spec.data.tokenizer.train_bpe
    from orchestrator.data import tokenizer

    text, _ = tokenizer.load(spec.data.tokenizer, _special_tokens(spec))
    return tokenizer.size_of(tokenizer.encoder(text))


def _special_tokens(spec: JobSpec) -> tuple[str, ...]:
    from workloads.objectives import special_tokens

    try:
        return special_tokens(spec.workload.objective)
    except WorkloadError as error:
        raise InputError(str(error), "workload.objective") from None


def check_data(spec: JobSpec, data: str) -> tuple[ModelShape, str]:
    """The model's sizes over prepared data, and its digest. Raises InputError if the data holds not one sample."""
    from orchestrator.data.tokens import Tokens

    tokens = Tokens.open(data)
    batches_of(spec, tokens, workload_of(spec, tokens))
    return shape_of(spec, tokens.manifest.vocabulary), tokens.manifest.digest

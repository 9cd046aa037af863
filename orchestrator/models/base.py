"""The initial weights of a run: which they are, a check that they do not change, and how ranks read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.identity import BASE, KEPT, TILES, job_of_commit
from orchestrator.checkpoint.shard import digest
from orchestrator.config.errors import InputError
from orchestrator.config.workload import ShrinkSpec, WorkloadSpec
from orchestrator.data.prepared import EXCERPT
from orchestrator.models.commit_weights import CommitWeights, TransformersTensors, has_transformers_weights
from orchestrator.models.named_commit import commit_at, split_tag
from orchestrator.storage.retry import Retry
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local
from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FOLDER, FolderConfig, root
from workloads.hf.files.meaning import (
    BY_NAME,
    FolderMeaning,
    by_label,
    folder_meaning,
    naming_labels,
    rows_of_labels,
)
from workloads.hf.files.weight_names import METADATA, has_weights, stale_in, weights_of_model
from workloads.own.object_reference import is_object_reference

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from orchestrator.checkpoint.manifest import CommitManifest
    from workloads.load import Begin
    from workloads.model.config import TransformerConfig
    from workloads.model.stored import StoredWeights
    from workloads.own.model import OwnModel
    from workloads.workload import Workload

INIT = "workload.init_from"
MODEL = "workload.model"
INIT_HINT = "give a run directory, or an export's folder"
RESTORE_OR_MOVE = "restore them, or set their new path in the run's job.yaml"
RESTORE_OR_START = "restore the original weights, or start a new run"

DEPTH_KEYS = ("layers", "decoder_layers")
FREE_KEYS = ("vocab_size", "max_positions", "pooler")
"""Keys in which a base and a run may differ, as long as the shapes of the weights match."""
READ_SIZE = 2**24


@dataclass(frozen=True)
class Base:
    """A run's initial weights: those of a run's commit at `step`, or of a Hugging Face folder (step None).

    `digest` is a checksum of the commit's manifest, or of the folder's configuration and weights.
    """

    uri: str
    step: int | None
    digest: str


NO_BASE: Base | None = None
"""Stands for no base: the run starts from random weights."""


def base_json(base: Base | None) -> dict[str, Any] | None:
    """Return a base as plain data."""
    return asdict(base) if base else None


def base_of(
    workload: WorkloadSpec, needs_base: bool, recorded: Mapping[str, Any], settled: bool
) -> Base | None:
    """Return the job's initial weights; None if it starts from random weights.

    Args:
        workload: the job's model.
        needs_base: whether the run needs the weights that it began with at every start.
        recorded: the base that the run started from, as JSON; empty for a new run.
        settled: whether the run no longer needs it, because a commit has all weights.

    Raises InputError if the weights are missing or have changed.
    """
    where = INIT if workload.init_from else MODEL
    missing = InputError(
        "the weights that the run began with are gone", f"{where} {recorded.get('uri')}", RESTORE_OR_MOVE
    )
    try:
        current = named_base(workload, recorded.get("step"))
    except (InputError, WorkloadError) as error:
        if recorded and settled and not needs_base:
            return Base(**recorded)
        if recorded:
            raise missing from None
        raise error if isinstance(error, InputError) else InputError(str(error), where) from None
    if recorded and current is None:
        if settled and not needs_base:
            return Base(**recorded)
        raise missing
    if recorded and current is not None and current.digest != recorded["digest"]:
        settled_before = settled and not needs_base and current.step is None
        if settled_before and _digest_of(current.uri, stale_too=True) == recorded["digest"]:
            return current
        problem = "the weights that the run started from have changed"
        raise InputError(problem, f"{where} {recorded['uri']}", RESTORE_OR_START)
    return current


def base_of_commit(workload: WorkloadSpec, reads_base: bool, commit: CommitManifest) -> Base | None:
    """Return the weights that a commit's run began with; None for random weights.

    If the commit lacks some of them, raises InputError if they are missing, have changed, or cannot be drawn again.
    """
    check_drawn(reads_base, commit)
    base_fields = commit.meta.get(BASE)
    if reads_base and base_fields:
        return base_of(workload, True, base_fields, True)
    return Base(**base_fields) if base_fields else None


def check_drawn(reads_base: bool, commit: CommitManifest | None) -> None:
    """Raise InputError if the commit lacks random weights from an earlier version, which drew other numbers."""
    if commit is None or not reads_base or commit.meta.get(BASE) or TILES in commit.meta:
        return
    problem = (
        f"the commit at step {commit.step} lacks frozen weights, which an earlier version drew in another way"
    )
    raise InputError(problem, "train.freeze", "begin another run")


def same_base(workload: WorkloadSpec, needs_base: bool, base: Base | None) -> Base | None:
    """Return `base` after checking it again, if ranks will read it: it may have changed since the attempt before.

    Raises InputError if it has changed.
    """
    return base_of(workload, needs_base, asdict(base), True) if base and needs_base else base


def named_base(workload: WorkloadSpec, step: int | None) -> Base | None:
    """Return the initial weights that the job names. `step` selects the commit of a run. Raises InputError."""
    init_from = workload.init_from
    if init_from is None:
        model_folder = weights_of_model(workload.model)
        return Base(model_folder, None, _digest_of(model_folder)) if model_folder is not None else None
    uri, tag = split_tag(init_from)
    folder = root(uri)
    if is_local(uri) and not (folder / "config.json").exists() and (folder / METADATA).exists():
        problem = f"{uri} has weights of torch.distributed.checkpoint and no config.json"
        raise InputError(problem, INIT, "put the config.json of the model into that folder")
    if is_local(uri) and any((folder / name).exists() for name in ("config.json", "own.json")):
        if tag:
            raise InputError(f"{uri} is an export, which has no step", INIT, "leave out what follows the @")
        if not has_weights(str(folder)):
            raise InputError(
                f"{uri} has no weights", INIT, "give a folder with safetensors, or a run directory"
            )
        return Base(str(folder), None, _digest_of(str(folder)))
    manifest = commit_at(
        uri, tag if step is None else step, INIT, "has no commit, and is not an export", INIT_HINT
    )
    return Base(uri, manifest.step, digest(manifest.to_bytes()))


def _digest_of(folder: str, stale_too: bool = False) -> str:
    """Return a checksum of the configuration and all weights in a folder. Unmodified files are not read again.

    With `stale_too`, return the checksum of earlier versions, which included leftovers of an earlier save.
    """
    names = ("config.json", "model.safetensors.index.json", ".metadata")
    suffixes = (".safetensors", ".distcp")
    paths = [p for p in sorted(Path(folder).rglob("*")) if p.suffix in suffixes or p.name in names]
    if not stale_too:
        stale = {path for parent in {p.parent for p in paths} for path in stale_in(parent)}
        paths = [path for path in paths if path not in stale]
    stats = [(p.stat(), str(p.relative_to(folder))) for p in paths]
    return _digest_of_files(folder, tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for s, name in stats))


@lru_cache(maxsize=8)
def _digest_of_files(folder: str, files: tuple[tuple[str, int, int, int], ...]) -> str:
    import xxhash

    hasher = xxhash.xxh3_128()
    for name, size, _, _ in files:
        hasher.update(f"{name}:{size}\n".encode())
        with Path(folder, name).open("rb") as file:
            while block := file.read(READ_SIZE):
                hasher.update(block)
    return hasher.hexdigest()


def tokenizer_notes(base: Base, tokenizer: Tokenizer) -> list[str]:
    """Return one line if the base has a tokenizer that maps ids to other tokens than this one."""
    differing = tokens_that_differ(base.uri, base.step is not None, tokenizer)
    if not differing:
        return []
    return [
        f"{len(differing)} tokens differ in the tokenizer of {base.uri}: what its weights learnt about "
        "them is lost"
    ]


def tokens_that_differ(uri: str, is_run: bool, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of another tokenizer whose ids stand for other tokens in `tokenizer`.

    Args:
        uri: a run directory or a folder, which has the other tokenizer. Without one the result is empty.
        is_run: whether `uri` is a run directory.
        tokenizer: the job's tokenizer.
    """
    from tokenizers import Tokenizer

    from orchestrator.data.store.data_folder import DataFolder

    text = DataFolder(f"{uri}/{EXCERPT}" if is_run else uri).read("tokenizer.json")
    if text is None:
        return []
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    theirs = Tokenizer.from_str(text.decode()).get_vocab()
    return [token for token, number in theirs.items() if number in names and names[number] != token]


def pruned_notes(base: Base) -> list[str]:
    """Return one line if the base is a commit with pruned weights, which a run without pruning trains."""
    if base.step is None:
        return []
    from orchestrator.checkpoint.pieces import PRUNE

    commit = Store(RunDir(base.uri).commits).manifest(base.step)
    if not any(name.startswith(PRUNE) for name in commit.tensors):
        return []
    return [
        f"{base.uri}@{base.step} is pruned, and its zero weights are trained like the others; to hold them, set "
        "prune: {keep: true}"
    ]


def weights_of(
    base: Base,
    workload: WorkloadSpec,
    labels: Sequence[str],
    retry: Retry | None = None,
    data_format: int = BY_NAME,
) -> Begin:
    """Return a function that reads the weights of `base` for a model of the job.

    Its arguments are the model's configuration and shapes, the tables with a row for each token, and the smallest id
    from which all tokens were added. It raises WorkloadError if the weights do not fit. Rows of a label head follow
    the job's labels, except over prepared data of an earlier `data_format`.
    """

    def labelled(weights: StoredWeights, theirs: FolderMeaning, where: str) -> StoredWeights:
        if data_format < BY_NAME:
            return weights
        objective = workload.objective
        return by_label(weights, theirs, objective, labels, where, is_folder=base.step is None)

    def read(
        config: TransformerConfig | OwnModel,
        shapes: Mapping[str, torch.Size],
        tables: Collection[str],
        added: int,
    ) -> StoredWeights:
        if workload.shrink:
            full_size = workload.model_copy(update={"shrink": None})
            begin = weights_of(base, full_size, labels, retry, data_format)
            return _part_of(base, begin, workload.shrink, config, shapes=shapes, tables=tables, added=added)
        from orchestrator.models import averaged
        from workloads.describe import describe
        from workloads.hf.convert.load_weights import HuggingFaceWeights, pretrained

        if config.divided_by == "declaration":
            return _weights_for_own_model(
                base, config, shapes, retry, labels if data_format >= BY_NAME else ()
            )
        if base.step is None:
            if workload.grow:
                raise WorkloadError(f"{base.uri} is an export; workload.grow takes a run directory")
            _refuse_unlike(describe(f"{FOLDER}{base.uri}"), config, base.uri)
            meaning = folder_meaning(base.uri)
            with naming_labels(meaning, workload.objective, labels, base.uri):
                result = pretrained(config, shapes, base.uri, tables, added)
            return labelled(result, meaning, base.uri)
        store, manifest = commit_of(base, retry)
        theirs = has_transformers_weights(manifest)
        if job := job_of_commit(manifest):
            config_of_run = manifest.meta.get(KEPT)
            kept = FolderConfig(**config_of_run) if config_of_run else None
            _refuse_other_make(
                job.workload, workload, config=config, where=base.uri, converted=theirs, kept=kept
            )
        average = job.checkpoint if job else CheckpointSpec()
        recorded = manifest.meta.get(BASE)
        base_weights = None
        if job and job.reads_base and recorded:
            base_of_run = same_base(job.workload, job.needs_base, Base(**recorded))
            base_weights = (
                weights_of(base_of_run, job.workload, job.data.labels, retry)(config, shapes, tables, added)
                if base_of_run
                else None
            )
        reader = averaged.weights_of(store, manifest, average)
        where = f"{base.uri}@{base.step}"
        run_meaning = FolderMeaning(tuple(job.data.labels)) if job else FolderMeaning()
        if theirs:
            if workload.grow or base_weights:
                problem = "was trained as a class of transformers; export it, and begin with the export"
                raise WorkloadError(f"{where} {problem}")
            with naming_labels(run_meaning, workload.objective, labels, where, is_folder=False):
                result = HuggingFaceWeights(
                    config,
                    shapes,
                    folder=where,
                    tables=tables,
                    added=added,
                    weights=TransformersTensors(reader),
                )
            return labelled(result, run_meaning, where)
        stored = {name: tensor.shape for name, tensor in sorted(reader.manifest.tensors.items())}
        grown = shapes if workload.grow else ()
        committed = CommitWeights(stored, where, reader, base_weights, grown)
        with naming_labels(run_meaning, workload.objective, labels, where, is_folder=False):
            committed.check(config, shapes, tables, added)
        return labelled(committed, run_meaning, where)

    return read


def _part_of(
    base: Base,
    begin: Begin,
    shrink: ShrinkSpec,
    config: TransformerConfig | OwnModel,
    shapes: Mapping[str, torch.Size],
    tables: Collection[str],
    added: int,
) -> StoredWeights:
    """Return the weights of `base`, read by `begin`, for a model that is a part of it. Its units are not chosen yet."""
    from workloads.describe import describe
    from workloads.model.shrink import Shrunk, base_of_size, kept_layers
    from workloads.transformer_workload import shapes_of

    theirs = None
    if base.step is None:
        theirs = describe(f"{FOLDER}{base.uri}").as_transformer
    elif job := job_of_commit(commit_of(base)[1]):
        kept = commit_of(base)[1].meta.get(KEPT)
        their_workload = job.workload
        theirs = describe(
            their_workload.model,
            their_workload.changes,
            vocab_size=1,
            implementation=their_workload.implementation,
            kept=FolderConfig(**kept) if kept else None,
        ).as_transformer
    ours = config.as_transformer
    if theirs is None or ours is None:
        raise WorkloadError(
            f"workload.shrink works on this project's layers only, and {base.uri} has others; remove it"
        )
    large = base_of_size(ours, theirs)
    layers = kept_layers(ours, large, shrink.layers, shrink.decoder_layers)
    return Shrunk(begin(large, shapes_of(large), tables, added), ours, large, shapes, layers)


def commit_of(base: Base, retry: Retry | None = None) -> tuple[Store, CommitManifest]:
    """Return the store of a base that is a commit, and its manifest. Raises InputError if it is another commit now."""
    assert base.step is not None
    store = Store(RunDir(base.uri).commits, retry=retry)
    manifest = store.manifest(base.step)
    if digest(manifest.to_bytes()) != base.digest:
        raise InputError(
            f"the commit at step {base.step} is not the one that the run began with",
            base.uri,
            RESTORE_OR_START,
        )
    return store, manifest


def _weights_for_own_model(
    base: Base,
    config: OwnModel,
    shapes: Mapping[str, torch.Size],
    retry: Retry | None,
    labels: Sequence[str] = (),
) -> StoredWeights:
    """Return the weights of an own model's commit, or of a folder, for an own model with the same tensors.

    The code cannot know which tensors have a row for each of the `labels`, so a run with other labels, or with
    another order, is refused.
    """
    from orchestrator.models import averaged
    from workloads.own.folder import FolderWeights

    if base.step is None:
        return FolderWeights(config, base.uri, shapes)
    store, manifest = commit_of(base, retry)
    where = f"{base.uri}@{base.step}"
    base_weights = None
    recorded = manifest.meta.get(BASE)
    job = job_of_commit(manifest)
    if job and job.workload.adapter and job.workload.adapter.kind != "bitfit":
        raise WorkloadError(f"{where} was trained with an adapter; export it, and begin with the export")
    if job:
        _refuse_other_labels(job.data.labels, labels, where)
    if job and job.reads_base and recorded:
        base_of_run = same_base(job.workload, job.needs_base, Base(**recorded))
        if base_of_run:
            base_weights = _weights_for_own_model(base_of_run, config, shapes, retry, job.data.labels)
    reader = averaged.weights_of(store, manifest, job.checkpoint if job else CheckpointSpec())
    stored_shapes = {name: tensor.shape for name, tensor in sorted(reader.manifest.tensors.items())}
    weights = CommitWeights(stored_shapes, where, reader, base_weights)
    weights.check_same_shapes(shapes)
    return weights


def _refuse_other_labels(theirs: Sequence[str], ours: Sequence[str], where: str) -> None:
    """Raise WorkloadError if the run at `where` has other labels than the job, or another order of them.

    Nothing says which rows of an own model belong to labels, so they cannot be sorted.
    """
    if theirs and ours and list(theirs) != list(ours):
        names = ", ".join(theirs)
        raise WorkloadError(f"{where} was trained for the labels {names}; give data.labels in that order")


def check_future_own_base(base_workload: Workload, ours: Workload, where: str) -> None:
    """Raise WorkloadError if the weights of the run at `where`, which has no commit yet, will not fit the own model."""
    their_labels = getattr(base_workload.objective, "labels", ())
    our_labels = getattr(ours.objective, "labels", ())
    _refuse_other_labels(their_labels, our_labels, where)
    CommitWeights(
        {f"model.{name}": shape for name, shape in base_workload.shapes.items()}, where
    ).check_same_shapes(ours.shapes)


def check_future_base(
    theirs: WorkloadSpec,
    their_labels: Sequence[str],
    base_workload: Workload,
    workload: WorkloadSpec,
    labels: Sequence[str],
    ours: Workload,
    where: str,
) -> None:
    """Raise WorkloadError if the weights of a run without a commit will not fit the job.

    Args:
        theirs: the model of the run.
        their_labels: its labels.
        base_workload: its workload.
        workload: the model that begins with them.
        labels: its labels.
        ours: its workload.
        where: the run.
    """
    from workloads.model.stored import OUTPUT

    if workload.shrink:
        workload, ours = _whole_of(workload, workload.shrink, ours, base_workload)
    _refuse_other_make(theirs, workload, ours.config, where)
    if any(name in base_workload.shapes for name in OUTPUT):
        rows_of_labels(their_labels, labels, where, is_folder=False)
    shapes = {f"model.{name}": shape for name, shape in base_workload.shapes.items()}
    weights = CommitWeights(shapes, where, stacked_names=ours.shapes if workload.grow else ())
    weights.check(ours.config, ours.shapes, ours.tables, ours.vocabulary.added)


def _whole_of(
    workload: WorkloadSpec, shrink: ShrinkSpec, ours: Workload, base_workload: Workload
) -> tuple[WorkloadSpec, Workload]:
    """Return a model that is a part of a base, in the size of the base.

    Raises WorkloadError if the model is not a part of the base.
    """
    from workloads.model.shrink import base_of_size, kept_layers

    large = base_of_size(ours.config, base_workload.config)
    kept_layers(ours.config, large, shrink.layers, shrink.decoder_layers)
    return workload.model_copy(update={"shrink": None}), replace(ours, config=large)  # type: ignore[type-var]


def _refuse_other_make(
    theirs: WorkloadSpec,
    ours: WorkloadSpec,
    config: TransformerConfig,
    where: str,
    converted: bool = False,
    kept: FolderConfig | None = None,
) -> None:
    """Raise WorkloadError if the weights of a run of `theirs` have another meaning in a run of `ours`.

    Args:
        theirs, ours: the models of the two jobs.
        config: the model of `ours`.
        where: the run of `theirs`.
        converted: its weights are of transformers' class and are converted to this project's.
        kept: the configuration that it has kept of its folder; None if it has none or has not started.
    """
    from workloads.describe import describe

    if is_object_reference(theirs.model):
        raise WorkloadError(
            f"{where} is a run of {theirs.model}, an own model; only an own model can start from it"
        )
    if theirs.adapter and theirs.adapter.kind != "bitfit":
        raise WorkloadError(f"{where} was trained with an adapter; export it, and begin with the export")
    if theirs.mup != ours.mup:
        raise WorkloadError(f"{where} was trained with mup {theirs.mup}; set workload.mup to the same")
    free = (*FREE_KEYS, *DEPTH_KEYS) if ours.grow else FREE_KEYS
    implementation = "auto" if converted else theirs.implementation
    described = describe(
        theirs.model,
        theirs.changes,
        vocab_size=1,
        objective=theirs.objective,
        classes=None,
        implementation=implementation,
        kept=kept,
    )
    _refuse_unlike(described, config, where, free)


def _refuse_unlike(theirs: Any, ours: TransformerConfig, where: str, free: Sequence[str] = FREE_KEYS) -> None:
    """Raise WorkloadError if another model would compute something else with the same weights."""
    from workloads.hf.convert.write_folder import structure

    if not (their_config := theirs.as_transformer):
        raise WorkloadError(
            f"{where} is a class of transformers that runs as it is; name it in workload.model"
        )
    our_structure = structure(ours)
    their_structure = structure(their_config)
    for name in sorted(our_structure.keys() - set(free)):
        if our_structure[name] != their_structure[name]:
            raise WorkloadError(
                f"{where} has {name} {their_structure[name]!r}, but workload.model {our_structure[name]!r}; "
                "give the model of the base"
            )

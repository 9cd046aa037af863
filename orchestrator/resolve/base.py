"""The weights that a run begins with: which they are, that they stay the same, and how ranks read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.identity import BASE, KEPT, TILES, job_of_commit
from orchestrator.checkpoint.shard import digest
from orchestrator.checkpoint.store import Store
from orchestrator.config.checkpoint import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.resolve.commit_weights import CommitWeights, TheirTensors, of_their_class
from orchestrator.resolve.named_commit import commit_at, place_and_tag
from orchestrator.resolve.prepared_data import EXCERPT
from orchestrator.storage.retry import Retry
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local
from workloads.errors import WorkloadError
from workloads.hf.hf_config import FOLDER, FolderConfig
from workloads.hf.meaning import BY_NAME, FolderMeaning, by_label, folder_meaning, rows_of_labels
from workloads.own.object_reference import is_object_reference

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from orchestrator.checkpoint.manifest import CommitManifest
    from workloads.load import Begin
    from workloads.model.config import TransformerConfig
    from workloads.model.stored import StoredWeights
    from workloads.own.model import OwnModel, OwnWorkload
    from workloads.transformer_workload import TransformerWorkload

INIT = "workload.init_from"
MODEL = "workload.model"
PLACES = "give a run directory, or an export's folder"
BACK = "put them back, or name their new place in the run's job.yaml"
PUT_BACK = "put them back as they were, or start another run"

DEPTH = ("layers", "decoder_layers")
FREE = ("vocab_size", "max_positions", "pooler")
"""What may differ between a base and a run, as far as the shapes of the weights allow it."""
BLOCK = 2**24


@dataclass(frozen=True)
class Base:
    """Weights that a run begins with: those of a run's commit at `step`, or of a Hugging Face folder (None). `digest`
    is a checksum of the commit's manifest, or of the folder's configuration and weights."""

    uri: str
    step: int | None
    digest: str


NO_BASE: Base | None = None
"""That of a run that begins anew."""


def base_json(base: Base | None) -> dict[str, Any] | None:
    """A base as plain data."""
    return asdict(base) if base else None


def base_of(spec: JobSpec, begun: Mapping[str, Any], settled: bool) -> Base | None:
    """The weights that the job begins with, None if it begins anew.

    `begun` are those that the run has begun with, as JSON, empty for a run that begins; it does not need them any more
    if it has `settled`: it has a commit, which has all weights. Raises InputError if there are none, or not the same
    any more.
    """
    where = INIT if spec.workload.init_from else MODEL
    gone = InputError("the weights that the run began with are gone", f"{where} {begun.get('uri')}", BACK)
    try:
        found = named_base(spec, begun.get("step"))
    except (InputError, WorkloadError) as error:
        if begun and settled and not spec.needs_base:
            return Base(**begun)
        if begun:
            raise gone from None
        raise error if isinstance(error, InputError) else InputError(str(error), where) from None
    if begun and found is None:
        if settled and not spec.needs_base:
            return Base(**begun)
        raise gone
    if begun and found is not None and found.digest != begun["digest"]:
        settled_before = settled and not spec.needs_base and found.step is None
        if settled_before and _digest_of(found.uri, stale_too=True) == begun["digest"]:
            return found
        what = "the weights that the run began with are not the same any more"
        raise InputError(what, f"{where} {begun['uri']}", PUT_BACK)
    return found


def base_of_commit(spec: JobSpec, commit: CommitManifest) -> Base | None:
    """The weights that the run of a commit began with, None if it began anew. If the commit lacks some of them, raises
    InputError if they are gone, or not the same any more, or cannot be drawn again."""
    check_drawn(spec, commit)
    begun = commit.meta.get(BASE)
    if spec.reads_base and begun:
        return base_of(spec, begun, True)
    return Base(**begun) if begun else None


def check_drawn(spec: JobSpec, commit: CommitManifest | None) -> None:
    """Raise InputError if weights that the commit lacks were drawn by an earlier version, which drew others."""
    if commit is None or not spec.reads_base or commit.meta.get(BASE) or TILES in commit.meta:
        return
    what = (
        f"the commit at step {commit.step} lacks frozen weights, which an earlier version drew in another way"
    )
    raise InputError(what, "train.freeze", "begin another run")


def same_base(spec: JobSpec, base: Base | None) -> Base | None:
    """`base`, looked at again if ranks are to read it again: it may have changed since the attempt before. Raises
    InputError if it has."""
    return base_of(spec, asdict(base), True) if base and spec.needs_base else base


def named_base(spec: JobSpec, step: int | None) -> Base | None:
    """The weights that the job names, of a run those of the commit at `step`, if it is given. Raises InputError."""
    from workloads.hf.hf_config import FOLDER, root

    asked = spec.workload.init_from
    if asked is None and not spec.workload.model.startswith(FOLDER):
        return (
            None  # of torch, which is imported below, a controller has no other need before training begins
        )
    from workloads.hf.dcp import METADATA
    from workloads.hf.weights import has_weights, weights_of_model

    if asked is None:
        named = weights_of_model(spec.workload.model)
        return Base(named, None, _digest_of(named)) if named is not None else None
    uri, tag = place_and_tag(asked)
    folder = root(uri)
    if is_local(uri) and not (folder / "config.json").exists() and (folder / METADATA).exists():
        what = f"{uri} has weights of torch.distributed.checkpoint and no config.json"
        raise InputError(what, INIT, "put the config.json of the model beside them")
    if is_local(uri) and any((folder / name).exists() for name in ("config.json", "own.json")):
        if tag:
            raise InputError(f"{uri} is an export, which has no step", INIT, "leave out what follows the @")
        if not has_weights(str(folder)):
            raise InputError(
                f"{uri} has no weights", INIT, "give a folder with safetensors, or a run directory"
            )
        return Base(str(folder), None, _digest_of(str(folder)))
    manifest = commit_at(uri, tag if step is None else step, INIT, "has no commit, and is no export", PLACES)
    return Base(uri, manifest.step, digest(manifest.to_bytes()))


def _digest_of(folder: str, stale_too: bool = False) -> str:
    """A checksum of the configuration and all weights in a folder; files that were not touched are not read again. With
    `stale_too` it is that of earlier versions, which took in what an earlier save has left."""
    from workloads.hf.weights import stale_in

    names = ("config.json", "model.safetensors.index.json", ".metadata")
    kinds = (".safetensors", ".distcp")
    paths = [p for p in sorted(Path(folder).rglob("*")) if p.suffix in kinds or p.name in names]
    if not stale_too:
        stale = {path for place in {p.parent for p in paths} for path in stale_in(place)}
        paths = [path for path in paths if path not in stale]
    found = [(p.stat(), str(p.relative_to(folder))) for p in paths]
    return _digest_of_files(folder, tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for s, name in found))


@lru_cache(maxsize=8)
def _digest_of_files(folder: str, files: tuple[tuple[str, int, int, int], ...]) -> str:
    import xxhash

    found = xxhash.xxh3_128()
    for name, size, _, _ in files:
        found.update(f"{name}:{size}\n".encode())
        with Path(folder, name).open("rb") as file:
            while block := file.read(BLOCK):
                found.update(block)
    return found.hexdigest()


def tokenizer_notes(base: Base, tokenizer: Tokenizer) -> list[str]:
    """A line if the tokenizer of the base, where that can be told, has other tokens than this one."""
    from tokenizers import Tokenizer

    from orchestrator.data.store.data_folder import DataFolder

    text = DataFolder(base.uri if base.step is None else f"{base.uri}/{EXCERPT}").read("tokenizer.json")
    if text is None:
        return []
    theirs = Tokenizer.from_str(text.decode()).get_vocab()
    ours = tokenizer.get_vocab()
    names = {number: token for token, number in ours.items()}
    unlike = [number for token, number in theirs.items() if number in names and names[number] != token]
    if not unlike:
        return []
    return [
        f"{len(unlike)} tokens are others in the tokenizer of {base.uri}: what its weights know of them is lost"
    ]


def weights_of(base: Base, spec: JobSpec, retry: Retry | None = None, data_format: int = BY_NAME) -> Begin:
    """What reads the weights of `base` for a model of the job, given its configuration, its shapes, the tables with a
    row a token, and the least id from which on all tokens were added; raises WorkloadError if they do not fit. A head
    of labels has its rows by the job's labels, except over prepared data of an earlier `data_format`."""

    def labelled(weights: StoredWeights, theirs: FolderMeaning, where: str) -> StoredWeights:
        if data_format < BY_NAME:
            return weights
        objective = spec.workload.objective
        labels = spec.data.labels
        return by_label(weights, theirs, objective, labels, where, is_folder=base.step is None)

    def read(
        config: TransformerConfig | OwnModel,
        shapes: Mapping[str, torch.Size],
        tables: Collection[str],
        added: int,
    ) -> StoredWeights:
        from orchestrator.checkpoint import averaged
        from workloads.describe import describe
        from workloads.hf.pretrained import HuggingFaceWeights, pretrained
        from workloads.model.config import TransformerConfig

        if not isinstance(config, TransformerConfig):
            return _of_own(base, config, shapes, retry, spec.data.labels if data_format >= BY_NAME else ())
        if base.step is None:
            if spec.workload.grow:
                raise WorkloadError(f"{base.uri} is an export; workload.grow takes a run directory")
            _refuse_unlike(describe(f"{FOLDER}{base.uri}"), config, base.uri)
            found = pretrained(config, shapes, base.uri, tables, added)
            meaning = folder_meaning(base.uri)
            if data_format >= BY_NAME:
                _check_decoder_start(spec, meaning, base.uri)
            return labelled(found, meaning, base.uri)
        store, manifest = _commit_of(base, retry)
        theirs = of_their_class(manifest)
        if job := job_of_commit(manifest):
            config_of_run = manifest.meta.get(KEPT)
            kept = FolderConfig(**config_of_run) if config_of_run else None
            _refuse_other_make(job, spec, config, base.uri, theirs, kept)
        average = job.checkpoint if job else CheckpointSpec()
        lacks = manifest.meta.get(BASE)
        below = None
        if job and job.reads_base and lacks:
            under = same_base(job, Base(**lacks))
            below = weights_of(under, job, retry)(config, shapes, tables, added) if under else None
        reader = averaged.weights_of(store, manifest, average)
        where = f"{base.uri}@{base.step}"
        meant = FolderMeaning(tuple(job.data.labels)) if job else FolderMeaning()
        if theirs:
            if spec.workload.grow or below:
                what = "was trained as a class of transformers; export it, and begin with the export"
                raise WorkloadError(f"{where} {what}")
            found = HuggingFaceWeights(config, shapes, where, tables, added, TheirTensors(reader))
            return labelled(found, meant, where)
        there = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
        grown = shapes if spec.workload.grow else ()
        committed = CommitWeights(there, where, reader, below, grown)
        committed.check(config, shapes, tables, added)
        return labelled(committed, meant, where)

    return read


def _check_decoder_start(spec: JobSpec, theirs: FolderMeaning, where: str) -> None:
    """Raise WorkloadError if a preset's decoder would begin with padding, and that of the folder at `where` begins with
    another token. The configuration of a preset cannot say which."""
    start = theirs.decoder_start
    if (
        spec.workload.objective != "seq2seq"
        or "start" in spec.workload.options
        or start in (None, theirs.pad)
    ):
        return
    raise WorkloadError(
        f"the decoder of {where} begins with token {start}, and that of a preset with padding; "
        f"set workload.options.start to {start}, or name hf:{where} in workload.model"
    )


def _commit_of(base: Base, retry: Retry | None) -> tuple[Store, CommitManifest]:
    assert base.step is not None
    store = Store(RunDir(base.uri).commits, retry=retry)
    manifest = store.manifest(base.step)
    if digest(manifest.to_bytes()) != base.digest:
        raise InputError(f"the commit at step {base.step} is another one", base.uri, PUT_BACK)
    return store, manifest


def _of_own(
    base: Base,
    config: OwnModel,
    shapes: Mapping[str, torch.Size],
    retry: Retry | None,
    labels: Sequence[str] = (),
) -> StoredWeights:
    """The weights of the commit of an own model, or of a folder, for another one with the same tensors. Which of them
    are rows of `labels` is not known, so that a run of others, or of these in another order, is refused."""
    from orchestrator.checkpoint import averaged
    from workloads.own.folder import FolderWeights

    if base.step is None:
        return FolderWeights(config, base.uri, shapes)
    store, manifest = _commit_of(base, retry)
    where = f"{base.uri}@{base.step}"
    below = None
    lacks = manifest.meta.get(BASE)
    job = job_of_commit(manifest)
    if job and job.workload.adapter and job.workload.adapter.kind != "bitfit":
        raise WorkloadError(f"{where} was trained with an adapter; export it, and begin with the export")
    if job:
        _refuse_other_labels(job.data.labels, labels, where)
    if job and job.reads_base and lacks and (under := same_base(job, Base(**lacks))):
        below = _of_own(under, config, shapes, retry, job.data.labels)
    reader = averaged.weights_of(store, manifest, job.checkpoint if job else CheckpointSpec())
    there = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
    found = CommitWeights(there, where, reader, below)
    found.check_alike(shapes)
    return found


def _refuse_other_labels(theirs: Sequence[str], ours: Sequence[str], where: str) -> None:
    """Raise WorkloadError if the run of an own model at `where` has other labels, or in another order: which of its
    tensors have a row a label is not known."""
    if theirs and ours and list(theirs) != list(ours):
        named = ", ".join(theirs)
        raise WorkloadError(f"{where} was trained for the labels {named}; give data.labels in that order")


def check_own_base_to_come(there: OwnWorkload, ours: OwnWorkload, where: str) -> None:
    """Raise WorkloadError if the weights of a run at `where`, which has no commit yet, will not fit the own model."""
    theirs = getattr(there.objective, "labels", ())
    mine = getattr(ours.objective, "labels", ())
    _refuse_other_labels(theirs, mine, where)
    CommitWeights({f"model.{name}": shape for name, shape in there.shapes.items()}, where).check_alike(
        ours.shapes
    )


def check_base_to_come(
    theirs: JobSpec, there: TransformerWorkload, spec: JobSpec, ours: TransformerWorkload, where: str
) -> None:
    """Raise WorkloadError if the weights of a run of `theirs` at `where`, which has no commit yet and trains the
    workload `there`, will not fit the workload `ours` of the job `spec`."""
    from workloads.model.stored import OUTPUT

    _refuse_other_make(theirs, spec, ours.config, where)
    if any(name in there.shapes for name in OUTPUT):
        rows_of_labels(theirs.data.labels, spec.data.labels, where, is_folder=False)
    shapes = {f"model.{name}": shape for name, shape in there.shapes.items()}
    found = CommitWeights(shapes, where, grown=ours.shapes if spec.workload.grow else ())
    found.check(ours.config, ours.shapes, ours.tables, ours.vocabulary.added)


def _refuse_other_make(
    theirs: JobSpec,
    spec: JobSpec,
    config: TransformerConfig,
    where: str,
    converted: bool = False,
    kept: FolderConfig | None = None,
) -> None:
    """Raise WorkloadError if the weights of a run of `theirs` mean something else in a run of `spec`; if they are
    `converted`, those of transformers' class are taken as those of this project's. That run has `kept` the
    configuration of its folder, unless it has none or has not begun."""
    from workloads.describe import describe

    asked = theirs.workload
    if is_object_reference(asked.model):
        raise WorkloadError(
            f"{where} is a run of {asked.model}, an own model; only an own one begins with it"
        )
    if asked.adapter and asked.adapter.kind != "bitfit":
        raise WorkloadError(f"{where} was trained with an adapter; export it, and begin with the export")
    if asked.mup != spec.workload.mup:
        raise WorkloadError(f"{where} was trained with mup {asked.mup}; set workload.mup to the same")
    free = (*FREE, *DEPTH) if spec.workload.grow else FREE
    implementation = "auto" if converted else asked.implementation
    there = describe(asked.model, asked.changes, 1, asked.objective, None, implementation, kept)
    _refuse_unlike(there, config, where, free)


def _refuse_unlike(theirs: Any, ours: TransformerConfig, where: str, free: Sequence[str] = FREE) -> None:
    """Raise WorkloadError if a model of another make would compute otherwise with the same weights."""
    from workloads.hf.checkpoint import structure
    from workloads.model.config import TransformerConfig

    if not isinstance(theirs, TransformerConfig):
        raise WorkloadError(
            f"{where} is a class of transformers that is run as it is; name it in workload.model"
        )
    one = structure(ours)
    other = structure(theirs)
    for name in sorted(one.keys() - set(free)):
        if one[name] != other[name]:
            raise WorkloadError(
                f"{where} has {name} {other[name]!r}, and workload.model {one[name]!r}; give the model of the base"
            )

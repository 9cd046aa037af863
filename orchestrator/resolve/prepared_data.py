"""The location of a run's prepared data. The data is made if missing, and found again if moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from cluster.workers.cluster import Call, call_here
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_cleaning
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec, Source
from orchestrator.data.prepare.record_kind import EARLIER, kind_of
from orchestrator.data.prepared import EXCERPT, PreparedData
from orchestrator.resolve.resolved_job import is_framed, special_tokens_of
from orchestrator.storage.retry import Retry, storage_failed
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest
    from orchestrator.data.progress import Progress
    from orchestrator.data.store.manifest import DataManifest
    from orchestrator.data.store.tokens import Tokens


def data_cache(data: DataSpec, run: RunDir) -> str:
    """Return the folder of token shards: the job's, else one next to the runs, so that they share it."""
    return data.cache or f"{run.uri.rsplit('/', 1)[0]}/_data"


def prepared_before(data: DataSpec, run: RunDir, commit: CommitManifest | None) -> str:
    """Return the location of the data that a commit's run has prepared; empty without any."""
    before = str(commit.meta.get("data", "")) if commit else ""
    for location in (before, f"{data_cache(data, run)}/{_name(before)}") if before else ():
        if _manifest_at(location):
            return location
    return ""


def format_at(uri: str) -> int:
    """Return the format of the prepared data in a folder, or the format of new data if the folder has none."""
    from orchestrator.data.store.manifest import FORMAT

    stored = _manifest_at(uri) if uri else None
    return stored.format if stored else FORMAT


def _manifest_at(uri: str) -> DataManifest | None:
    """Return the manifest in a folder; None if it cannot be read, in which case the run prepares the data again."""
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder

    try:
        return manifest.read(DataFolder(uri))
    except InputError:
        return None


def prepared(
    spec: JobSpec,
    run: RunDir,
    before: PreparedData,
    tell: Progress,
    make: bool = True,
    on_first_part: Callable[[PreparedData], None] | None = None,
    call: Call = call_here,
) -> PreparedData:
    """Return the data that the run began with at `before`, with missing files made again; for a new run, the job's
    data.

    Args:
        spec: the job.
        run: the run directory.
        before: what the run began with; empty for a new run.
        tell: called with the progress.
        make: False raises InputError instead of making missing data.
        on_first_part: for streamed data, called when training can begin. From then on, CPUs are left free for the
            workers.
        call: reads the tokenizer, see `orchestrator.data.prepare.prepare.prepare`.

    Raises InputError if data is missing and the text has changed, because the run would then read other samples.
    """
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.quarantine import clear_note

    if spec.data.samples is not None:
        from orchestrator.data.samples.own_samples import prepare_samples

        named = spec.data.samples
        cache = data_cache(spec.data, run)
        return PreparedData(prepare_samples(named, spec.seed, cache, _name(before.uri)))
    data = before.uri
    begin = spec.data.streaming and on_first_part is not None
    complete = bool(data) and is_complete(DataFolder(data))
    prepare_text = partial(
        _prepared_text, spec.data, spec.workload, spec.resources, run, tell=tell, make=make, call=call
    )
    if not complete:
        data = prepare_text(before=_name(data), begin=begin, data_format=before.format)
    elif stored := manifest.read(DataFolder(data)):  # also checked for a run without a commit
        check_same_cleaning(spec.data.clean, spec.accept_code, stored.code, run.uri)
    sets = {
        name: _prepared_set(
            spec.data,
            spec.workload,
            spec.set_sources,
            run,
            name=name,
            trained=data,
            before=before.sets.get(name, ""),
            tell=tell,
            make=make,
            call=call,
        )
        for name in spec.set_sources
    }
    all_data = PreparedData(data, sets)
    if on_first_part and begin and not complete:
        on_first_part(all_data)
        prepare_text(before=_name(data), begin=False)
    for uri in (data, *sets.values()):
        clear_note(DataFolder(uri))
    return all_data


def _prepared_text(
    data: DataSpec,
    workload: WorkloadSpec,
    resources: ResourceSpec,
    run: RunDir,
    before: str,
    tell: Progress,
    make: bool,
    begin: bool,
    data_format: int = 0,
    call: Call = call_here,
) -> str:
    """Return the URI of the token shards of data.sources, see `orchestrator.data.prepare.prepare.prepare`."""
    from orchestrator.data.prepare.prepare import prepare as prepare_data

    workers = resources.workers.max * resources.per_worker.cpu if data.streaming else 0.0
    return prepare_data(
        data,
        special_tokens_of(data, workload),
        data_cache(data, run),
        tell,
        before=before,
        kind_of=partial(kind_of, data, workload.objective),
        framed=is_framed(data, workload),
        make=make,
        begin=begin,
        leave=0.0 if begin else workers,
        data_format=data_format,
        call=call,
    )


def _prepared_set(
    data: DataSpec,
    workload: WorkloadSpec,
    held_out: Mapping[str, tuple[str, list[Source]]],
    run: RunDir,
    name: str,
    trained: str,
    before: str,
    tell: Progress,
    make: bool,
    call: Call,
) -> str:
    """Return the token shards of the set `name`, with the tokenizer of the data at `trained`; made unless they exist.

    The text of a set that the run had `before` must not change, because its results are compared. Raises InputError.
    """
    from orchestrator.data.prepare.fingerprint import TextChanged
    from orchestrator.data.prepare.prepare import prepare as prepare_data
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.samples.sections import published
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder

    where, sources = held_out[name]
    existing = manifest.read(DataFolder(before)) if before and is_complete(DataFolder(before)) else None
    if existing and [source.uri for source in existing.sources] == [source.name for source in sources]:
        return before
    text = data.model_copy(update={"sources": sources, "clean": []})
    published_data = published.read(DataFolder(trained))
    # the tokenizer with which the run reads its texts
    is_old = published_data is not None and published_data.format <= EARLIER
    try:
        return prepare_data(
            text,
            (),
            data_cache(data, run),
            tell,
            before=_name(before),
            tokenizer_of=trained,
            where=where,
            kind_of=partial(kind_of, data, workload.objective),
            framed=is_framed(data, workload) and not is_old,
            make=make,
            call=call,
        )
    except TextChanged:
        hint = "restore it, or add the new text as a set with another name"
        raise InputError("differs from the text that the run has evaluated so far", where, hint) from None


def _name(uri: str) -> str:
    return uri.rstrip("/").rsplit("/", 1)[-1]


def has_all_files(data: PreparedData) -> bool:
    """Return whether all files of prepared data exist. On an object store, they count as present unless known to be
    missing.
    """
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.quarantine import is_noted

    folders = map(DataFolder, (data.uri, *data.sets.values()))
    return all(is_complete(folder) if folder.local else not is_noted(folder) for folder in folders)


def keep_excerpt(run: RunDir, data: str) -> None:
    """Store an excerpt of the data in the run directory, for use when the data is gone. Failures are ignored."""
    from orchestrator.data.store.excerpt import write_excerpt

    try:
        write_excerpt(data, run.at(EXCERPT))
    except Exception as error:
        if not storage_failed(error):
            raise


def data_of(run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """Return the prepared data at `data`, or the run's excerpt if the data is gone. Raises InputError."""
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.tokens import Tokens

    excerpt = run.at(EXCERPT)
    is_gone = not is_complete(DataFolder(data, retry)) and is_complete(DataFolder(excerpt, retry))
    return Tokens.open(excerpt if is_gone else data, retry, keep=0)


def data_location(data_spec: DataSpec, run: RunDir, data: str) -> str | None:
    """Return the location of prepared data that a commit names, see `tokens_of`; None if it is in neither place."""
    from orchestrator.data.samples.sections import published
    from orchestrator.data.store.data_folder import DataFolder

    locations = (data, f"{data_cache(data_spec, run)}/{data.rsplit('/', 1)[-1]}")
    return next((location for location in locations if published.read(DataFolder(location))), None)


def tokens_of(data_spec: DataSpec, run: RunDir, data: str) -> Tokens:
    """Return the prepared data that a checkpoint names: in its old folder or in the run's present cache, as both may
    have moved.

    Args:
        data_spec: the key `data` of the job.
        run: the run directory.
        data: the location that the checkpoint names, a path or URI.

    Raises:
        InputError: it is in neither folder.
    """
    from orchestrator.data.store.tokens import Tokens

    if (location := data_location(data_spec, run, data)) is not None:
        return Tokens.open(location)
    hint = f"make it again with `orchestrator data prepare {run.at('job.yaml')} --run-dir {run.uri}`"
    raise InputError("the prepared data of this run is missing", data, hint)

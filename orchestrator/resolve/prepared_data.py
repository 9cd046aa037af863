"""Where a run's prepared data is, made when it is missing, found again when it was moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_cleaning
from orchestrator.config.records import COLUMNS, PREFERENCES
from orchestrator.config.spec import JobSpec
from orchestrator.data.store.manifest import RECORDS_FORMAT
from orchestrator.resolve.resolved_job import is_framed, special_tokens_of
from orchestrator.storage.retry import Retry, storage_failed
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest
    from orchestrator.data.prepare.records import RecordKind
    from orchestrator.data.progress import Progress
    from orchestrator.data.store.manifest import DataManifest
    from orchestrator.data.store.tokens import Tokens

EARLIER = 5
"""The last format in which texts had no frame, and special tokens were those that one file names."""
EXCERPT = "excerpt"
"""Where a run directory has a little of its data."""


def data_cache(spec: JobSpec, run: RunDir) -> str:
    """Where token shards are kept: named by the job, else beside the runs, so that all of them share it."""
    return spec.data.cache or f"{run.uri.rsplit('/', 1)[0]}/_data"


def prepared_before(spec: JobSpec, run: RunDir, commit: CommitManifest | None) -> str:
    """Where the data is that the run of a `commit` has prepared; empty if there is none."""
    before = str(commit.meta.get("data", "")) if commit else ""
    for place in (before, f"{data_cache(spec, run)}/{_name(before)}") if before else ():
        if _manifest_at(place):
            return place
    return ""


def format_at(place: str) -> int:
    """The format of the prepared data at a place; that of new data where there is none."""
    from orchestrator.data.store.manifest import FORMAT

    found = _manifest_at(place) if place else None
    return found.format if found else FORMAT


def _manifest_at(place: str) -> DataManifest | None:
    """The manifest of the prepared data at a place, None if none can be read: the run prepares the data again."""
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder

    try:
        return manifest.read(DataFolder(place))
    except InputError:
        return None


@dataclass(frozen=True)
class PreparedData:
    """Where a job's prepared data is: that of `data.sources`, empty if there is none yet, and by name that of the sets
    that have text of their own."""

    uri: str = ""
    sets: dict[str, str] = field(default_factory=dict)


def kind_of(spec: JobSpec, data_format: int = RECORDS_FORMAT) -> RecordKind | None:
    """How the job's rows become records of prepared data of `data_format`, None if its objective reads text. Raises
    InputError."""
    objective = spec.workload.objective
    location = spec.data.tokenizer
    if objective not in COLUMNS:
        return None
    from orchestrator.data.prepare.conversations import (
        asks_for_day,
        check_tokens,
        dated,
        find_template,
        find_tool_template,
    )
    from orchestrator.data.prepare.records import RecordKind

    if not isinstance(location, str) or objective not in ("conversation", *PREFERENCES):
        return RecordKind(objective, tuple(spec.data.labels))
    given = spec.data.chat_template
    day = spec.data.chat_date
    found = find_template(location, given, data_format)
    if found and data_format > EARLIER:
        check_tokens(found, location)
    if found is None and objective == "conversation":  # the rows of others may be texts, which need none
        raise InputError(
            "has no chat template", f"data.tokenizer {location}", "name a Jinja file in data.chat_template"
        )
    if found is None:
        return RecordKind(objective)
    with_tools = find_tool_template(location, given)
    only_tools_ask = asks_for_day(with_tools) and not asks_for_day(found[0])
    text, tokens = dated(found, None if only_tools_ask else day)
    with_tools, _ = dated((with_tools, tokens), day if asks_for_day(with_tools) else None)
    return RecordKind(objective, (), text, tokens, with_tools)


def prepare(spec: JobSpec, run: RunDir, tell: Progress) -> PreparedData:
    """The job's token shards, made now unless they are there. Raises InputError."""
    return prepared(spec, run, PreparedData(), tell)


def prepared(
    spec: JobSpec,
    run: RunDir,
    before: PreparedData,
    tell: Progress,
    make: bool = True,
    begun: Callable[[PreparedData], None] | None = None,
) -> PreparedData:
    """The data that the run began with at `before`, made again as far as it is gone; the job's, for a run that begins.

    Of data that is streamed, `begun` is called when training can begin with it: then CPUs are left for the workers.
    Raises InputError if it is gone and the text is no longer the same: the run would not be the same run; without
    `make` if it is gone.
    """
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.quarantine import clear_note

    if spec.data.samples is not None:
        from orchestrator.data.samples.own_samples import prepare_samples

        named = spec.data.samples
        cache = data_cache(spec, run)
        return PreparedData(prepare_samples(named, spec.seed, cache, _name(before.uri)))
    data = before.uri
    begin = spec.data.streaming and begun is not None
    whole = bool(data) and is_complete(DataFolder(data))
    if not whole:
        data = _prepared_text(spec, run, _name(data), tell, make, begin)
    elif found := manifest.read(DataFolder(data)):  # of a run without a commit, too
        check_same_cleaning(spec, found.code, run.uri)
    sets = {
        name: _prepared_set(spec, run, name, data, before.sets.get(name, ""), tell, make)
        for name in spec.set_sources
    }
    there = PreparedData(data, sets)
    if begun and begin and not whole:
        begun(there)
        _prepared_text(spec, run, _name(data), tell, make, False)
    for uri in (data, *sets.values()):
        clear_note(DataFolder(uri))
    return there


def _prepared_text(spec: JobSpec, run: RunDir, before: str, tell: Progress, make: bool, begin: bool) -> str:
    """The URI of the token shards of data.sources, see `orchestrator.data.prepare.prepare.prepare`."""
    from orchestrator.data.prepare.prepare import prepare as prepare_data

    workers = spec.resources.workers.max * spec.resources.per_worker.cpu if spec.data.streaming else 0.0
    return prepare_data(
        spec.data,
        special_tokens_of(spec),
        data_cache(spec, run),
        tell,
        before=before,
        kind_of=partial(kind_of, spec),
        framed=is_framed(spec),
        make=make,
        begin=begin,
        leave=0.0 if begin else workers,
    )


def _prepared_set(
    spec: JobSpec, run: RunDir, name: str, data: str, before: str, tell: Progress, make: bool
) -> str:
    """The token shards of the set `name`, by the tokenizer of `data`; made unless they are there. The text of a set
    that the run had `before` may not change, since its values are compared.

    Raises InputError.
    """
    from orchestrator.data.prepare.fingerprint import TextChanged
    from orchestrator.data.prepare.prepare import prepare as prepare_data
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.samples.sections import published
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder

    where, sources = spec.set_sources[name]
    there = manifest.read(DataFolder(before)) if before and is_complete(DataFolder(before)) else None
    if there and [source.uri for source in there.sources] == [source.name for source in sources]:
        return before
    text = spec.data.model_copy(update={"sources": sources, "clean": []})
    trained = published.read(DataFolder(data))
    is_old = trained is not None and trained.format <= EARLIER  # by which the run reads its texts
    try:
        return prepare_data(
            text,
            (),
            data_cache(spec, run),
            tell,
            before=_name(before),
            tokenizer_of=data,
            where=where,
            kind_of=partial(kind_of, spec),
            framed=is_framed(spec) and not is_old,
            make=make,
        )
    except TextChanged:
        hint = "put it back as it was, or add this one as a set of another name"
        raise InputError("is not the text that the run has evaluated so far", where, hint) from None


def _name(uri: str) -> str:
    return uri.rstrip("/").rsplit("/", 1)[-1]


def is_whole(data: PreparedData) -> bool:
    """Whether the files of prepared data are all there; of data on a store, none of which is known to be missing."""
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.quarantine import is_noted

    folders = map(DataFolder, (data.uri, *data.sets.values()))
    return all(is_complete(folder) if folder.local else not is_noted(folder) for folder in folders)


def keep_excerpt(run: RunDir, data: str) -> None:
    """Put a little of the data into the run directory, for what comes when the data may be gone; none if that fails."""
    from orchestrator.data.store.excerpt import write_excerpt

    try:
        write_excerpt(data, run.at(EXCERPT))
    except Exception as error:
        if not storage_failed(error):
            raise


def data_of(run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """Prepared data at `data`, or the run's excerpt of it where that is gone. Raises InputError."""
    from orchestrator.data.prepare.shards import is_complete
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.tokens import Tokens

    kept = run.at(EXCERPT)
    gone = not is_complete(DataFolder(data, retry)) and is_complete(DataFolder(kept, retry))
    return Tokens.open(kept if gone else data, retry, keep=0)


def place_of_data(spec: JobSpec, run: RunDir, data: str, retry: Retry | None = None) -> str | None:
    """Where prepared data is that a commit of the run names, see `tokens_of`; None if it is in neither place."""
    from orchestrator.data.samples.sections import published
    from orchestrator.data.store.data_folder import DataFolder

    places = (data, f"{data_cache(spec, run)}/{data.rsplit('/', 1)[-1]}")
    return next((place for place in places if published.read(DataFolder(place, retry))), None)


def tokens_of(spec: JobSpec, run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """The prepared data that a commit of the run names: where it was, or in the cache that the run has now, since both
    may have been moved.

    Raises InputError if it is in neither.
    """
    from orchestrator.data.store.tokens import Tokens

    if (place := place_of_data(spec, run, data, retry)) is not None:
        return Tokens.open(place, retry)
    hint = f"make it again with `orchestrator data prepare {run.at('job.yaml')} --run-dir {run.uri}`"
    raise InputError("the prepared data of this run is gone", data, hint)

"""Where a run's prepared data is, made when it is missing, found again when it was moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec
from orchestrator.resolve.resolved_job import special_tokens_of
from orchestrator.storage.retry import Retry, storage_failed
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from orchestrator.data.tokens import Tokens

EXCERPT = "excerpt"
"""Where a run directory has a little of its data."""


def data_cache(spec: JobSpec, run: RunDir) -> str:
    """Where token shards are kept: named by the job, else beside the runs, so that all of them share it."""
    return spec.data.cache or f"{run.uri.rsplit('/', 1)[0]}/_data"


def prepare(spec: JobSpec, run: RunDir, tell: Callable[[str, int, int], None]) -> str:
    """The URI of the job's token shards, made now unless they are there. Raises InputError."""
    from orchestrator.data.prepare import prepare as prepare_data

    return prepare_data(spec.data, special_tokens_of(spec), data_cache(spec, run), tell)


def prepared(spec: JobSpec, run: RunDir, before: str, tell: Callable[[str, int, int], None]) -> str:
    """The data that the run began with at `before`, made again as far as it is gone; the job's, for a run that begins.

    Raises InputError if it is gone and the text is no longer the same: the run would not be the same run.
    """
    from orchestrator.data.data_folder import DataFolder
    from orchestrator.data.shards import is_complete

    if before and is_complete(DataFolder(before)):
        return before
    from orchestrator.data.prepare import prepare as prepare_data

    name = before.rstrip("/").rsplit("/", 1)[-1]
    return prepare_data(spec.data, special_tokens_of(spec), data_cache(spec, run), tell, before=name)


def is_whole(data: str) -> bool:
    """Whether the files of prepared data are all there; of data on a store, which ranks copy, it is not asked."""
    from orchestrator.data.data_folder import DataFolder
    from orchestrator.data.shards import is_complete

    folder = DataFolder(data)
    return not folder.local or is_complete(folder)


def keep_excerpt(run: RunDir, data: str) -> None:
    """Put a little of the data into the run directory, for what comes when the data may be gone; none if that fails."""
    from orchestrator.data.excerpt import write_excerpt

    try:
        write_excerpt(data, run.at(EXCERPT))
    except Exception as error:
        if not storage_failed(error):
            raise


def data_of(run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """Prepared data at `data`, or the run's excerpt of it where that is gone. Raises InputError."""
    from orchestrator.data.data_folder import DataFolder
    from orchestrator.data.shards import is_complete
    from orchestrator.data.tokens import Tokens

    kept = run.at(EXCERPT)
    gone = not is_complete(DataFolder(data, retry)) and is_complete(DataFolder(kept, retry))
    return Tokens.open(kept if gone else data, retry)


def tokens_of(spec: JobSpec, run: RunDir, data: str, retry: Retry | None = None) -> Tokens:
    """The prepared data that a commit of the run names: where it was, or in the cache that the run has now, since both
    may have been moved.

    Raises InputError if it is in neither.
    """
    from orchestrator.data import manifest
    from orchestrator.data.data_folder import DataFolder
    from orchestrator.data.tokens import Tokens

    for place in (data, f"{data_cache(spec, run)}/{data.rsplit('/', 1)[-1]}"):
        if manifest.read(DataFolder(place, retry)):
            return Tokens.open(place, retry)
    hint = f"make it again with `orchestrator data prepare {run.at('job.yaml')} --run-dir {run.uri}`"
    raise InputError("the prepared data of this run is gone", data, hint)

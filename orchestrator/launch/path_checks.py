"""Check the paths and URIs of a job: all processes see them, and those that are written are writable."""

from __future__ import annotations

import os
from collections.abc import Sequence

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.data.config import DataSpec, Source
from orchestrator.observe.mlflow_checks import check_tracking_server
from orchestrator.observe.sinks.check import check_sinks
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import check_uri, is_local, local_path, unwritable


def check_written(checkpoint: CheckpointSpec, data: DataSpec, run_dir: RunDir, address: str | None) -> None:
    """Raise InputError if a folder that the run writes is not writable, or its export cannot be pushed.

    Folders that only workers write are checked if the workers run here (`address` is None).
    """
    problems = Problems()
    if why := unwritable(run_dir.uri):
        with problems.noted():
            problem = f"the run directory cannot be written ({why})"
            raise InputError(problem, run_dir.uri, "give another --run-dir")
    with problems.noted():
        run_dir.check_ours()
    target = checkpoint.export_to
    # An export is drafted next to its target.
    draft_folder = os.path.dirname(target) if target and is_local(target) else target
    for where, uri in {"data.cache": data.cache, "checkpoint.export_to": draft_folder}.items():
        if address is None and uri and (why := unwritable(uri)):
            with problems.noted():
                hint = "check its permissions, or give another folder"
                raise InputError(f"cannot be written ({why})", f"{where} {uri}", hint)
    if checkpoint.push is not None:
        from orchestrator.export.hub import check_push

        with problems.noted():
            folder = target or run_dir.at("export")
            check_push(checkpoint.push, folder, "checkpoint.push", needs_token=address is None)
    problems.raise_noted()


def check_uris(
    data: DataSpec, export_to: str | None, sources: Sequence[tuple[str, Source]], run_dir: RunDir
) -> None:
    """Raise InputError for paths and URIs that are malformed, or that only one process would see.

    Args:
        data: the job's data.
        export_to: the target of its exports.
        sources: all sources, with their keys in the job file.
        run_dir: the run directory.
    """
    uris = {"--run-dir": run_dir.uri, "data.cache": data.cache, "checkpoint.export_to": export_to}
    for where, uri in uris.items():
        if uri is not None:
            check_uri(uri, where)
    named = [(f"{where}.uri", uri) for where, source in sources for uri in source.uris]
    for where, uri in [*uris.items(), *named]:
        if (uri or "").startswith("memory://"):
            problem = f"{uri} is the memory of one process, and a run has several"
            raise InputError(problem, where, "give a folder that all nodes see, or a store such as s3://")
    cache = local_path(data.cache) if data.cache and is_local(data.cache) else ""
    if os.path.lexists(cache) and not os.path.isdir(cache):
        raise InputError("is not a folder", f"data.cache {cache}", "give another")


def check_sample_cache(data: DataSpec, seed: int, run_dir: RunDir) -> None:
    """Raise InputError if own samples cannot be prepared in the job's cache."""
    if data.samples is not None and not is_local(cache := data_cache(data, run_dir)):
        from orchestrator.data.samples.own_samples import check_cache

        check_cache(data.samples, seed, cache)


def check_all_uris(spec: JobSpec, run_dir: RunDir) -> None:
    """Check the paths and URIs of every component of a job, one component after the other. Raises InputError."""
    check_uris(spec.data, spec.checkpoint.export_to, spec.every_source, run_dir)
    check_sample_cache(spec.data, spec.seed, run_dir)
    check_tracking_server(spec.tracking)
    check_sinks(spec.sinks)

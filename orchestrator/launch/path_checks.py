"""Check the paths and URIs of a job: all processes see them, and those that are written are writable."""

from __future__ import annotations

import os

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.data.config import DataSpec, Source
from orchestrator.observe.mlflow_checks import check_experiment, check_registered_name, check_tracking
from orchestrator.observe.sinks.follow import check_sinks
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import check_uri, is_local, local_path, unwritable


def check_written(checkpoint: CheckpointSpec, data: DataSpec, run_dir: RunDir, address: str | None) -> None:
    """Raise InputError if a folder that the run writes is not writable.

    Folders that only workers write are checked if the workers run here (`address` is None).
    """
    problems = Problems()
    if why := unwritable(run_dir.uri):
        with problems.noted():
            what = f"the run directory cannot be written ({why})"
            raise InputError(what, run_dir.uri, "give another --run-dir")
    with problems.noted():
        run_dir.check_ours()
    target = checkpoint.export_to
    # An export is drafted beside its target.
    beside = os.path.dirname(target) if target and is_local(target) else target
    for where, uri in {"data.cache": data.cache, "checkpoint.export_to": beside}.items():
        if address is None and uri and (why := unwritable(uri)):
            with problems.noted():
                hint = "check its permissions, or give another folder"
                raise InputError(f"cannot be written ({why})", f"{where} {uri}", hint)
    problems.raise_noted()


def check_places(spec: JobSpec, run_dir: RunDir) -> None:
    """Raise InputError for paths and URIs that are malformed, or that only one process would see."""
    places = {
        "--run-dir": run_dir.uri,
        "data.cache": spec.data.cache,
        "checkpoint.export_to": spec.checkpoint.export_to,
    }
    for where, uri in places.items():
        if uri is not None:
            check_uri(uri, where)
    named = [(f"{where}.uri", place) for where, source in sources_of(spec) for place in source.places]
    for where, uri in [*places.items(), *named]:
        if (uri or "").startswith("memory://"):
            what = f"{uri} is the memory of one process, and a run has several"
            raise InputError(what, where, "give a folder that all nodes see, or a store such as s3://")
    cache = local_path(spec.data.cache) if spec.data.cache and is_local(spec.data.cache) else ""
    if os.path.lexists(cache) and not os.path.isdir(cache):
        raise InputError("is no folder", f"data.cache {cache}", "give another")
    if spec.data.samples is not None and not is_local(place := data_cache(spec.data, run_dir)):
        from orchestrator.data.samples.own_samples import check_cache

        check_cache(spec.data.samples, spec.seed, place)
    if spec.tracking:
        check_tracking(spec.tracking.uri)
        check_experiment(spec.tracking)
        check_registered_name(spec.tracking.register_as, "tracking.register_as")
    check_sinks(spec.sinks)


def sources_of(spec: JobSpec) -> list[tuple[str, Source]]:
    """Return all sources with their keys in the job file, those of held-out text too."""
    groups = [("data.sources", spec.data.sources), *spec.set_sources.values()]
    return [(f"{where}.{number}", source) for where, group in groups for number, source in enumerate(group)]

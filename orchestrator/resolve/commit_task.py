"""The inputs of a task that starts from a commit of a finished run, or of one that goes on elsewhere."""

from __future__ import annotations

from typing import Any

from orchestrator.checkpoint.config import RunIdentity
from orchestrator.checkpoint.identity import check_commit, check_shards
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.models.base import base_json, base_of_commit
from orchestrator.models.kept_config import check_read_config, config_json, kept_config
from orchestrator.resolve.prepared_data import tokens_of
from orchestrator.resolve.training_inputs import digest_of
from orchestrator.storage.run_directory import RunDir


def inputs_of_commit(
    run: RunDir,
    commit: CommitManifest,
    identity: RunIdentity,
    workload: WorkloadSpec,
    data: DataSpec,
    reads_base: bool,
) -> dict[str, Any]:
    """Check that a commit belongs to a run of the job, and return the fields of a `Task` that starts from it.

    Args:
        run: the run directory.
        commit: the commit.
        identity: what the run is compared with.
        workload: the model.
        data: the data.
        reads_base: whether commits lack weights, which are read from where the run began.

    Raises:
        InputError: the commit belongs to another run, or its data or its base is missing.
    """
    check_commit(commit, identity.keys, identity.own_code, identity.accepted, run.at("job.yaml"))
    tokens = tokens_of(data, run, commit.meta["data"])
    check_shards(commit, digest_of(data, tokens), tokens.folder.uri)
    check_read_config(workload, commit, run.uri)
    return {
        "run": run.uri,
        "data": tokens.folder.uri,
        "base": base_json(base_of_commit(workload, reads_base, commit)),
        "folder_config": config_json(kept_config(commit)),
    }

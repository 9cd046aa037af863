"""A job as the run in its directory goes on with it, and the check that the directory is the job's."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import check_same_config, kept_config
from orchestrator.resolve.commit_model import as_begun, check_implementation
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.prepared_data import prepared_before
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
from workloads.hf.files.hf_config import FolderConfig

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest


@dataclass(frozen=True)
class BegunJob:
    """A job as the run in its directory goes on with it.

    Attributes:
        spec: the job, with the settings that a run keeps from its beginning.
        commit: the newest commit of the run; None without one.
        prepared: the folder of the run's data; empty before it has begun.
        folder_config: the run's copy of the configuration of its pretrained folder.
        begins: whether it is known that the run begins anew.
    """

    spec: JobSpec
    commit: CommitManifest | None = None
    prepared: str = ""
    folder_config: FolderConfig | None = None
    begins: bool = False

    def in_run(self, run_dir: RunDir) -> BegunJob:
        """Check that the directory is that of the job's run, or of none yet. Return the job as the run has begun it.

        Raises InputError.
        """
        if run_dir.rows(TRIALS):
            hint = f"give the run a folder of its own: --run-dir {shlex.quote(f'{run_dir.uri}-run')}; or use tune"
            raise InputError("is the folder of a search", run_dir.uri, hint)
        spec = self.spec.with_parts(train=as_its_run(self.spec.train, run_dir))
        commit = check_same_run(spec.run_identity, run_dir)
        check_implementation(spec.workload, commit, run_dir.uri)
        prepared = prepared_before(spec.data, run_dir, commit)
        first_commit = continuation_of(spec).begun_from(run_dir, commit)[1]
        check_same_config(spec.workload, first_commit, run_dir.uri)
        spec = spec.with_parts(workload=as_begun(spec.workload, first_commit))
        if commit is None:
            kind_of(spec.data, spec.workload.objective)
        return BegunJob(spec, commit, prepared, kept_config(first_commit), begins=commit is None)

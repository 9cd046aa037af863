"""What a run computes with: its prepared data, the weights that it began with, and the planner of its layouts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster.workers.cluster import Cluster
from orchestrator.checkpoint.identity import CODE
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.own_code import check_same_code, code_of, roots_of
from orchestrator.config.spec import JobSpec, dump
from orchestrator.controller.data_preparation import DataPreparation, StorageWait
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.run_planner import planner_on
from orchestrator.controller.state import State
from orchestrator.models.base import NO_BASE, Base, base_json, same_base
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import config_json, kept_config
from orchestrator.models.pinned_base import bases_of, pinned_teacher, unpinned_notes
from orchestrator.planner.demand import demand_of
from orchestrator.planner.planner import Planner
from orchestrator.resolve.prepared_data import PreparedData, has_all_files, keep_excerpt, prepared
from orchestrator.resolve.training_inputs import Beginning, ShapeOfData, shape_over
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task
from workloads.hf.files.hf_config import FolderConfig

DataCheck = Callable[[PreparedData], None]
"""Called with the prepared data before training. It may raise InputError."""


def accept(data: PreparedData) -> None:
    """Accept any prepared data."""


class RunInputs:
    """The inputs of one run. They are found in two steps: `look` for the data, then `resolve`.

    Attributes:
        demand: what the job asks of the planner.
        data: the prepared data; empty before it is.
        shards: the digest of the token shards.
        planner: plans layouts; None before `resolve`.
    """

    def __init__(
        self,
        job: JobSpec,
        run: RunDir,
        cluster: Cluster,
        check: DataCheck,
        stored: StorageWait,
        tell: Callable[[str], None],
    ) -> None:
        """Find nothing yet.

        Args:
            job: the job.
            run: the run directory.
            cluster: where the run's workers are.
            check: refuses prepared data.
            stored: retries calls that need storage.
            tell: gets a line about the progress.
        """
        self._job = job
        self.demand = demand_of(job)
        self._run = run
        self._cluster = cluster
        self._check = check
        self._stored = stored
        self.preparation = DataPreparation(partial(prepared, job, run, call=cluster.call), stored, tell)
        self._continuation = continuation_of(job)
        self.data = PreparedData()
        self.shards = ""
        self.planner: Planner | None = None
        self._base: Base | None = NO_BASE
        """The pretrained weights that the run began with."""
        self._teacher: Base | None = None
        """The weights of the teacher that the run learns from."""
        self._folder_config: FolderConfig | None = None
        """The configuration of a pretrained folder, as the run keeps it."""

    @property
    def base_json(self) -> dict[str, Any] | None:
        """The weights that the run began with, as JSON."""
        return base_json(self._base)

    @property
    def teacher_json(self) -> dict[str, Any] | None:
        """The weights of the teacher, as JSON; None without one."""
        return base_json(self._teacher)

    @property
    def folder_config_json(self) -> dict[str, Any] | None:
        """The configuration of a pretrained folder that the run keeps, as JSON; None without one."""
        return config_json(self._folder_config)

    def look(self, history: RunHistory, seconds: float) -> bool:
        """Prepare the data in a thread, wait up to `seconds` for it, and return whether training can begin.

        Raises:
            InputError: `check` refuses the data.
        """
        self.data = self.preparation.look(history, seconds)
        if self.data.uri:
            self._check(self.data)
        return bool(self.data.uri)

    def keep_excerpt(self) -> None:
        """Keep the beginning of the data in the run directory, for people."""
        keep_excerpt(self._run, self.data.uri)

    def forget_lost_data(self) -> None:
        """Prepare the data again if files of it are gone."""
        if not has_all_files(self.data):
            self.data = PreparedData()

    def resolve(
        self, history: RunHistory, is_stopped: Callable[[], bool], is_busy: Callable[[], bool]
    ) -> list[str]:
        """Find the weights, and make the planner, from the prepared data.

        Args:
            history: the record of the run.
            is_stopped: returns whether the run is to stop, which ends traces of layouts.
            is_busy: returns whether ranks run, so that no layout is traced.

        Returns:
            Notes for the user.

        Raises:
            InputError: the job does not fit its data, or the workers cannot hold its state.
        """
        job = self._job
        source, commit = self._stored(
            lambda: self._continuation.begun_from(self._run, history.commits.newest)
        )
        self._base, to_read = self._stored(
            lambda: bases_of(
                workload=job.workload,
                reads_base=job.reads_base,
                needs_base=job.needs_base,
                recorded=history.base,
                commit=commit,
                run=self._run,
            )
        )
        self._teacher = self._stored(
            lambda: pinned_teacher(job.distill, job.workload, history.teacher, self._run)
        )
        folder_config = kept_config(commit) or self._folder_config
        # It imports torch, which a process of the cluster may have done.
        beginning = Beginning(to_read, source)
        shape_found: ShapeOfData = self._stored(
            lambda: self._cluster.call(shape_over, job, self.data, beginning, folder_config)
        )
        self._folder_config = shape_found.folder_config
        notes = [*shape_found.notes, *self._stored(lambda: unpinned_notes(to_read, self._teacher, self._run))]
        self.shards = history.commits.same_shards(shape_found.shards, self.data.uri)
        self.planner, machine_notes = planner_on(
            self._cluster,
            self.demand,
            shape_found.shape,
            job=dump(job),
            is_stopped=is_stopped,
            is_busy=is_busy,
            resumes=history.commits.newest is not None,
        )
        return notes + machine_notes

    def first_commit(self) -> CommitManifest | None:
        """Return the commit of another run that this run begins with, copied into its store; None without one."""
        return self._stored(
            lambda: self._continuation.take_over(
                self._run,
                shards=self.shards,
                data=self.data,
                base=self._base,
                kept=self._folder_config,
            )
        )

    def task(self, state: State, commit: CommitManifest | None, **more: Any) -> Task:
        """Return the task of the attempt that `state` describes.

        Args:
            state: gives the attempt, the layout and the samples that are left out.
            commit: the commit to start from, None to start from the beginning.
            more: further fields of the task.

        Raises:
            InputError: the user's own code has changed since the commit.
        """
        assert state.layout is not None
        assert self.planner is not None
        job = self._job
        base = self._stored(lambda: same_base(job.workload, job.needs_base, self._base))
        own_code = job.own_code
        if commit is not None:  # the files may have been edited since the last attempt
            check_same_code(own_code, job.accept_code, commit.meta.get(CODE) or {}, self._run.uri)
        return Task(
            job=job.model_dump(mode="json"),
            layout=state.layout.to_json(),
            run=self._run.uri,
            data=self.data.uri,
            attempt=state.attempt,
            restore=commit.step if commit else None,
            token=secrets.token_hex(6),
            skips=tuple(skip.to_json() for skip in state.skips),
            sets=self.data.sets,
            shards=self.shards,
            base=base_json(base),
            teacher=self.teacher_json,
            folder_config=self.folder_config_json,
            code=code_of(own_code),
            code_roots=tuple(roots_of(own_code)),
            **{**more, **self.planner.flops},
        )

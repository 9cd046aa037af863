"""A run that continues another run from a commit: which commit that is, whether it fits, and how it is taken over.

The commit is copied into the run's own directory, so the other run is not needed afterwards, and restored like any
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import RunIdentity
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.evaluations import TO_EVALUATE
from orchestrator.checkpoint.identity import (
    BASE,
    CLASS_WEIGHTS,
    CLEANED_BY,
    CODE,
    CONTINUED,
    IDENTITY,
    KEPT,
    SHARDS,
    TEACHER,
    job_of_commit,
)
from orchestrator.checkpoint.last_commit import refuse_anew
from orchestrator.checkpoint.pins import holding
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_cleaning, check_same_code, code_of
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.prepared import PreparedData
from orchestrator.models.base import Base, base_json, base_of
from orchestrator.models.continued_keys import WHERE, check_keys
from orchestrator.models.kept_config import config_json
from orchestrator.models.named_commit import commit_at, split_tag
from orchestrator.storage.run_directory import ORIGIN, RunDir
from orchestrator.train.config import ContinueFrom, Reading, TrainSpec
from workloads.hf.files.hf_config import FolderConfig

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest

NO_COMMIT_HINT = "give a run directory with a commit; an export has only weights, for workload.init_from"
NEW_RUN_FIELDS: dict[str, Any] = {
    TO_EVALUATE: False,
    "attempt": 0,
    "rows": [],
    "loss": None,
    "last_evaluation_step": -1,
    "evaluation": {},
    "best": None,
    "stale": 0,
    "best_of": "",
    TEACHER: None,
}
"""Fields of a checkpoint about its run's attempts, rows and evaluations; these are the values of a new run."""


@dataclass(frozen=True)
class Source:
    """The commit of another run, at `uri`, that a run continues."""

    uri: str
    commit: CommitManifest

    def __str__(self) -> str:
        return f"{self.uri}@{self.commit.step}"

    @property
    def base(self) -> Base:
        """Return the run as a base for another run. Its digest is not needed, and empty."""
        return Base(self.uri, self.commit.step, "")

    def first_position(self, continue_from: ContinueFrom | None) -> int:
        """Return the position in the data at which a run of the job begins to read."""
        assert continue_from is not None
        return self.commit.position if continue_from.position == "keep" else 0

    def origin_json(self) -> dict[str, Any]:
        """Return what every commit of the continued run records about it."""
        commit = self.commit
        return {
            "run": self.uri,
            "step": commit.step,
            "position": commit.position,
            "receipt": commit.receipt,
        }


def check_length(train: TrainSpec, reading: Reading, step: int, source: str) -> None:
    """Raise InputError if the job ends before the step of the `source`, leaves too few steps for its schedule, or would
    begin within a rollout.
    """
    if step % reading.steps:
        problem = f"step {step} of {source} is within a rollout of this job, which has {reading.steps} steps"
        raise InputError(problem, WHERE, "name a multiple of them, or change rollout.steps or rollout.epochs")
    if train.steps <= step:
        problem = f"{train.steps} steps are not more than {source} has done"
        raise InputError(problem, "train.steps", "steps include those of the run before: raise it")
    assert train.continue_from is not None
    remaining = train.steps - step
    warmup = train.warmup_steps
    decay = train.decay_steps
    if train.continue_from.schedule == "restart" and warmup + max(decay, 1) > remaining:
        problem = f"warm-up and decay are {warmup + decay} steps, but this phase has {remaining}"
        raise InputError(problem, "train.optimizer", "shorten them, or raise train.steps")


def check_same_data(train: TrainSpec, source: Source, shards: str, data: str) -> None:
    """Raise InputError if the token shards in `data`, with that digest, are not those in which the job continues."""
    assert train.continue_from is not None
    if train.continue_from.position == "keep" and source.commit.meta.get(SHARDS, shards) != shards:
        problem = f"the tokens in {data} differ from those that {source} has read"
        hint = "give the same text; or read the data from their beginning, by train.continue_from.position restart"
        raise InputError(problem, WHERE, hint)


@dataclass(frozen=True)
class Continuation:
    """How the run of a job continues another run, if it does.

    Attributes:
        identity: what the run is compared with.
        workload: the model; what decides which weights exist must stay.
        data: the data, which must stay if the run keeps its position.
        train: names the other run, in `continue_from`.
        reading: which samples the steps read.
        reads_base: whether commits lack weights, which are read from where the run began.
        needs_base: whether the run needs the weights that it began with at every start.
    """

    identity: RunIdentity
    workload: WorkloadSpec
    data: DataSpec
    train: TrainSpec
    reading: Reading
    reads_base: bool
    needs_base: bool

    def source(self, run: RunDir) -> Source | None:
        """Return the commit that the job continues, the same one again once the run at `run` has begun; None if it
        continues none.

        Raises InputError if the commit is missing or does not fit the job.
        """
        continue_from = self.train.continue_from
        if continue_from is None:
            return None
        uri, tag = split_tag(continue_from.run)
        if RunDir(uri).uri == run.uri:
            raise InputError(
                "a run cannot continue itself", WHERE, "give the job another name, or name another run"
            )
        try:
            recorded_step = (run.read_json(ORIGIN) or {}).get("step")
        except InputError as error:
            hint = (
                "put it back; or remove it: the run has no commit yet, and begins from what the job names now"
            )
            raise InputError(error.what, error.where, hint) from None
        commit = commit_at(
            uri,
            tag if recorded_step is None else recorded_step,
            WHERE,
            "has no checkpoint to continue from",
            NO_COMMIT_HINT,
        )
        source = Source(uri, commit)
        self._check(continue_from, source)
        return source

    def begun_from(
        self, run: RunDir, newest: CommitManifest | None
    ) -> tuple[Source | None, CommitManifest | None]:
        """Return the source (see `source`) of a run without its own commit, and the commit that the run resumes from:
        its `newest` own one if it has one, else None.

        Raises InputError, also as `refuse_anew`.
        """
        refuse_anew(run, newest)
        source = self.source(run) if newest is None else None
        return source, source.commit if source else newest

    def _check(self, continue_from: ContinueFrom, source: Source) -> None:
        commit = source.commit
        theirs = job_of_commit(commit)
        if theirs is None:
            raise InputError(
                f"{source} was made by an earlier version",
                WHERE,
                "train its own run for some more steps, and continue from its new checkpoint",
            )
        self.check_keys(theirs.identity(), str(source))
        self._check_code(continue_from, commit.meta.get(CODE) or {}, str(source))
        if continue_from.position == "keep":
            hint = "read the data from the beginning by train.continue_from.position: restart"
            cleaned_by = commit.meta.get(CLEANED_BY) or {}
            accepted = self.identity.accepted
            check_same_cleaning(self.identity.clean, accepted, cleaned_by, str(source), hint)
        check_length(self.train, self.reading, commit.step, str(source))
        if self.workload.init_from or self.needs_base:
            base_of(self.workload, self.needs_base, commit.meta.get(BASE) or {}, True)

    def _check_code(self, continue_from: ContinueFrom, code_before: Mapping[str, str], source: str) -> None:
        """Raise InputError if the user's own code, where a phase must not change it, differs from the `source`'s."""
        free = {"train.optimizer.schedule", "evaluate.metrics"}
        if continue_from.position == "restart":
            free.add("data.samples")
        own_code = self.identity.own_code
        check_same_code(
            own_code,
            self.identity.accepted,
            {n: code for n, code in code_before.items() if own_code.get(n, "evaluate.metrics") not in free},
            source,
        )

    def check_keys(self, theirs: Mapping[str, Any], source: str) -> None:
        """Raise InputError if the job differs from that of the `source` in what must not change between phases.

        Args:
            theirs: the identity of that job, see `JobSpec.identity`.
            source: names its run.
        """
        assert self.train.continue_from is not None
        keeps_position = self.train.continue_from.position == "keep"
        check_keys(
            self.identity.keys,
            theirs,
            source,
            workload=self.workload,
            data=self.data,
            reads_base=self.reads_base,
            keeps_position=keeps_position,
        )

    def take_over(
        self,
        run: RunDir,
        shards: str,
        data: PreparedData,
        base: Base | None,
        kept: FolderConfig | None = None,
    ) -> CommitManifest | None:
        """Copy the commit that the job continues into the run's store, as its first commit; None if it continues none.

        ORIGIN records the source. Calling again completes an interrupted call. Raises InputError if the commit is
        missing, damaged, or does not fit.
        """
        source = self.source(run)
        if source is None:
            return None
        run.require_lock()
        theirs = Store(RunDir(source.uri).commits)
        ours = Store(run.commits)

        def choose(*_: object) -> int:
            result = self.source(run)
            assert result is not None
            return result.commit.step

        def copy(step: int) -> CommitManifest:
            source_at_step = Source(source.uri, theirs.manifest(step))
            try:
                with holding(theirs, step, f"the start of the run {run.uri}"):
                    if problems := theirs.verify(step):
                        raise InputError(
                            f"{source_at_step} is damaged: {problems[0]}",
                            WHERE,
                            "name another of its commits",
                        )
                    run.write_json(ORIGIN, source_at_step.origin_json())
                    meta, position = self._meta_of(
                        source_at_step, shards=shards, data=data, base=base, kept=kept
                    )
                    copy_commit(theirs, step, ours, meta, position)
                    return ours.manifest(step)
            except Exception:
                if step not in theirs.steps() and run.exists(ORIGIN):
                    run.remove(ORIGIN)  # a later call may succeed
                raise

        return read_chosen(theirs, None, copy, choose)

    def _meta_of(
        self,
        source: Source,
        shards: str,
        data: PreparedData,
        base: Base | None,
        kept: FolderConfig | None,
    ) -> tuple[dict[str, Any], int]:
        """Return the metadata of the first commit of a run that continues the `source`, and its position."""
        meta = {
            IDENTITY: dict(self.identity.keys),
            SHARDS: shards,
            BASE: base_json(base),
            KEPT: config_json(kept),
            CODE: code_of(self.identity.own_code),
            CONTINUED: source.origin_json(),
            CLASS_WEIGHTS: None,  # counted in the other run's data
            "data": data.uri,
            "sets": data.sets,
            **NEW_RUN_FIELDS,
        }
        position = source.first_position(self.train.continue_from)
        if position != source.commit.position:
            meta |= {"skips": [], "losses": []}
        return meta, position


def continuation_of(job: JobSpec) -> Continuation:
    """Return how the run of a job continues another run."""
    return Continuation(
        identity=job.run_identity,
        workload=job.workload,
        data=job.data,
        train=job.train,
        reading=job.reading,
        reads_base=job.reads_base,
        needs_base=job.needs_base,
    )

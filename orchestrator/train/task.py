"""The task of a worker group as plain data. Torch-free, because the controller creates it."""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster.workers.injected_faults import FaultSpec
from orchestrator.models.base import Base
from orchestrator.parallel.layout import Layout
from workloads.hf.files.hf_config import FOLDER, FolderConfig

EVALUATION_PATIENCE = 900.0
"""Maximum seconds to read a model, or to evaluate one global batch."""
ENTRY = "orchestrator.train.loop:main"
"""The entry point of the rank program."""
_WITH_DEEPSPEED = "orchestrator.train.engines.deepspeed_rank:main"
_WITH_TRANSFORMERS = "orchestrator.train.pretrained_rank:main"
PREEMPTION_NOTICES = "cluster.workers.preemption:PreemptionNotices"
"""The node service that watches for preemption notices."""
SNAPSHOT_SERVER = "orchestrator.checkpoint.snapshot_server:SnapshotServer"
"""The node service that keeps snapshots in memory."""
WEIGHT_SERVER = "orchestrator.checkpoint.snapshot_server:weight_server"
"""The node service that has the weights with which rollout workers generate."""


def entry_of(engine: str, model: str) -> str:
    """Return the entry point of an engine's ranks, given the model as a job names it. All run the same program, but
    differ in their first imports.
    """
    if engine == "deepspeed":
        return _WITH_DEEPSPEED
    return _WITH_TRANSFORMERS if model.startswith(FOLDER) else ENTRY


@dataclasses.dataclass(frozen=True)
class RolloutAddress:
    """Where ranks and rollout workers, or teacher workers, find each other.

    Attributes:
        address, token: of the queue of work, see `orchestrator.train.rollouts.work_queue`.
        weights_token: of the servers of weights, whose addresses the queue knows.
    """

    address: str
    token: str
    weights_token: str


@dataclasses.dataclass(frozen=True)
class Task:
    """The configuration of all ranks of one worker group.

    Attributes:
        job, layout: as JSON.
        run, data: URIs of the run directory and of the prepared data.
        attempt: number of the attempt, from 1.
        restore: step of the commit to start from; None for a fresh start.
        until: step at which the worker group ends with a commit, unless all steps are done earlier.
        commit: False in a replay, which writes nothing.
        evaluate_only: only evaluate the commit; the result has the row as "evaluation".
        token: unique to each worker group, so that files of earlier ones can be told apart.
        snapshot_servers: {"node", "address"} of each server that keeps snapshots in memory.
        snapshot_token: the token of these servers.
        faults: faults to inject, for tests; see `cluster.workers.injected_faults`.
        skips: windows of samples to leave out besides those in the commit; see `orchestrator.data.samples.skips.Skip`.
        shards: digest of the prepared data; empty if unknown.
        sets: by name, URIs of the prepared data of separate sets of held-out text.
        base: the initial weights, see `orchestrator.models.base.Base`; None for random initialisation.
        folder_config: the configuration of a pretrained folder that the run stored, as JSON, see
            `orchestrator.models.kept_config`; None without such a folder.
        flops_per_token, peak_flops: FLOPs of a token, forward and backward, without gradients of frozen weights; and
            FLOP/s of a worker in matrix products; 0 if unknown.
        code: hashes of the user's own code, see `orchestrator.config.own_code`; this node's code must have the same.
        cleaned_by: hashes of the user's own code that cleaned the text, from the prepared data.
        class_weights: counted in the prepared data if the job asks for balanced ones; empty otherwise.
        teacher: the weights of a teacher, see `orchestrator.models.base.Base`; None without one.
        rollouts: the fields of a `RolloutAddress`; None if the ranks generate answers, or logits, themselves.
        makes_rollouts: whether this is the task of a rollout worker, which generates answers until it is stopped, or of
            a teacher worker, which computes logits.
        code_roots: folders in which the controller found that code.
    """

    job: dict[str, Any]
    layout: dict[str, Any]
    run: str
    data: str
    attempt: int
    restore: int | None
    until: int
    commit: bool = True
    evaluate_only: bool = False
    token: str = ""
    snapshot_servers: tuple[dict[str, str], ...] = ()
    snapshot_token: str = ""
    faults: tuple[str, ...] = ()
    skips: tuple[dict[str, Any], ...] = ()
    shards: str = ""
    sets: dict[str, str] = dataclasses.field(default_factory=dict)
    base: dict[str, Any] | None = None
    folder_config: dict[str, Any] | None = None
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    code_roots: tuple[str, ...] = ()
    cleaned_by: dict[str, str] = dataclasses.field(default_factory=dict)
    class_weights: tuple[float, ...] = ()
    teacher: dict[str, Any] | None = None
    rollouts: dict[str, str] | None = None
    makes_rollouts: bool = False

    @classmethod
    def for_evaluation(
        cls, job: dict[str, Any], micro_batch: int, *, run: str, data: str, restore: int | None, **fields: Any
    ) -> Task:
        """Return the task of one process that evaluates the model of a commit, or the job's initial one, and writes
        nothing.

        The numbers of one process match those of any layout. Its micro-batch is one that fitted a rank's memory.

        Args:
            job: as JSON.
            micro_batch: samples of a micro-batch.
            run: URI of the run directory.
            data: URI of the prepared data.
            restore: step of the commit; None for the initial model.
            fields: further fields of the task.
        """
        return cls(
            job=job,
            layout=Layout(micro_batch=micro_batch).to_json(),
            run=run,
            data=data,
            restore=restore,
            until=restore or 0,
            commit=False,
            evaluate_only=True,
            **{"attempt": 0, **fields},
        )

    def for_rollout_worker(self) -> Task:
        """Return the task of a rollout worker, or teacher worker, beside the ranks of this one. It commits nothing."""
        return dataclasses.replace(
            self, layout=Layout().to_json(), commit=False, makes_rollouts=True, snapshot_servers=(), faults=()
        )

    @property
    def rollout_address(self) -> RolloutAddress | None:
        """Where rollout workers or teacher workers are found; None if the ranks do their work."""
        return RolloutAddress(**self.rollouts) if self.rollouts else None

    @property
    def parsed_layout(self) -> Layout:
        """The layout."""
        return Layout.from_json(self.layout)

    @property
    def parsed_faults(self) -> list[FaultSpec]:
        """The faults to inject."""
        return [FaultSpec.parse(text) for text in self.faults]

    @property
    def parsed_base(self) -> Base | None:
        """The initial weights; None for random initialisation."""
        return Base(**self.base) if self.base else None

    @property
    def parsed_teacher(self) -> Base | None:
        """The weights of the teacher; None without one."""
        return Base(**self.teacher) if self.teacher else None

    @property
    def parsed_folder_config(self) -> FolderConfig | None:
        """The configuration of a pretrained folder; None without such a folder."""
        return FolderConfig(**self.folder_config) if self.folder_config else None

    def to_json(self) -> dict[str, Any]:
        """Return the task as plain data."""
        return dataclasses.asdict(self)

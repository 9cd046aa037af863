"""The task of a gang, as plain data. Torch-free, since the controller makes it."""

from __future__ import annotations

import dataclasses
from typing import Any

ENTRY = "orchestrator.train.loop:main"
"""The entry point of the rank program."""
ENTRY_OF = {"torch": ENTRY, "deepspeed": "orchestrator.train.engines.deepspeed_rank:main"}
"""The entry point by engine; they differ in what is imported first."""
PREEMPTION_NOTICES = "cluster.workers.preemption:PreemptionNotices"
"""The node service that watches for preemption notices."""
SNAPSHOT_SERVER = "orchestrator.checkpoint.snapshot_server:SnapshotServer"
"""The node service that keeps snapshots in memory."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The configuration of all ranks of one gang.

    Attributes:
        job, layout: as JSON.
        run, data: URIs of the run directory and of the prepared data.
        attempt: number of the attempt, from 1.
        restore: step of the commit to start from; None for a fresh start.
        until: the gang ends with a commit at this step, or when all steps are done.
        commit: False in a replay, which writes nothing.
        evaluate_only: the gang evaluates the commit and ends; its result has the row as "evaluation".
        token: new for every gang, so that the files of an earlier one are told apart.
        snapshot_servers: {"node", "address"} of each server that keeps snapshots in memory.
        snapshot_token: the token of these servers.
        faults: faults to inject, for tests; see `cluster.workers.injected_faults`.
        skips: windows of samples to leave out besides those in the commit; see `orchestrator.data.skips.Skip`.
        shards: digest of the prepared data; empty if unknown.
        sets: URIs of the prepared data of sets of held-out text of their own, by name.
        base: the weights that the run begins with, see `orchestrator.resolve.base.Base`; None if it begins anew.
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

    def to_json(self) -> dict[str, Any]:
        """The task as plain data."""
        return dataclasses.asdict(self)

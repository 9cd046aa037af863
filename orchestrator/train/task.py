"""What a gang is told to do, as plain data; torch-free, since the controller writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

ENTRY = "orchestrator.train.loop:main"
"""The rank program, as a gang names it."""
ENTRY_OF = {"torch": ENTRY, "deepspeed": "orchestrator.train.engines.deepspeed_rank:main"}
"""The same by engine: what it imports first differs."""
PREEMPTION_NOTICES = "cluster.workers.preemption:PreemptionNotices"
"""What asks, on a node, whether it will be taken away."""
SNAPSHOT_SERVER = "orchestrator.checkpoint.snapshot_server:SnapshotServer"
"""What keeps snapshots in the memory of a node."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One attempt.

    `run` and `data` are URIs, `shards` is the digest of the data, if known; `restore` is the step of the commit to
    start from, None for a fresh start; the gang ends with a commit at step `until`, at the latest when all steps are
    done. `commit` is False in a replay, which writes nothing. `token` is new for every gang, so that the files of a
    dead one are told apart.
    `snapshot_servers` keep snapshots in memory, each {"node", "address"}, and know `snapshot_token`. `faults` are injected,
    for tests; see `cluster.workers.injected_faults`. `skips` are windows of samples that are left out, beside those
    that the commit names, each as `orchestrator.job.stability.Skip` writes it.
    """

    job: dict[str, Any]
    layout: dict[str, Any]
    run: str
    data: str
    attempt: int
    restore: int | None
    until: int
    commit: bool = True
    token: str = ""
    snapshot_servers: tuple[dict[str, str], ...] = ()
    snapshot_token: str = ""
    faults: tuple[str, ...] = ()
    skips: tuple[dict[str, Any], ...] = ()
    shards: str = ""

    def to_json(self) -> dict[str, Any]:
        """The task as plain data."""
        return dataclasses.asdict(self)

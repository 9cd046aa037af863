"""The commit that a rank starts from: in the memory of other nodes if it is complete there, else in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.identity import CODE, CONTINUED
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.checkpoint.peer_memory import PeerMemory
from orchestrator.checkpoint.reader import Reader
from orchestrator.checkpoint.snapshot_writer import Placement
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_code
from orchestrator.models.averaged import average_fields, weights_of
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.retry import Retry
from orchestrator.train.engines.engine import Engine
from orchestrator.train.task import Task
from orchestrator.train.training_progress import TrainingProgress


def peers_of(task: Task, context: WorkerContext) -> PeerMemory | None:
    """Return the memory of nodes, this node's first; None if the task has no snapshot servers.

    Args:
        task: names the servers.
        context: this rank's node.
    """
    if not task.snapshot_servers:
        return None
    nearest = sorted(task.snapshot_servers, key=lambda server: server["node"] != context.rank_info.node)
    return PeerMemory(task.snapshot_token, [server["address"] for server in nearest])


def placement_of(task: Task, context: WorkerContext) -> Placement | None:
    """Return where a rank's part of each snapshot is held: on its own node, and as a copy on another one.

    Without another node, this node's server is the only one. None if the task has no snapshot servers.

    Args:
        task: names the servers.
        context: this rank's number and node.
    """
    if not task.snapshot_servers:
        return None
    info = context.rank_info
    local_servers = [server["address"] for server in task.snapshot_servers if server["node"] == info.node]
    other_servers = [server["address"] for server in task.snapshot_servers if server["node"] != info.node]
    return Placement(
        token=task.snapshot_token,
        own=local_servers[0] if local_servers else "",
        other=other_servers[info.rank % len(other_servers)] if other_servers else "",
        attempt=task.attempt,
        group=task.token,
    )


class Restorer:
    """Opens the commits of a run, and loads them into engines."""

    def __init__(
        self,
        task: Task,
        peers: PeerMemory | None,
        checkpoint: CheckpointSpec,
        retry: Retry,
        measured: Mapping[str, Any],
        own_code: Mapping[str, str],
        accepted: Sequence[str],
        load_extra: Callable[[Reader], object] | None = None,
    ) -> None:
        """Make ready to open commits.

        Args:
            task: names the run. One that only evaluates reads the weights that the job evaluates.
            peers: the memory of nodes, see `peers_of`.
            checkpoint: which weights are averaged.
            retry: how to retry reads of the store.
            measured: how this job evaluates, see `TrainingProgress.of_commit`.
            own_code: the user's own code, see `JobSpec.own_code`.
            accepted: hashes of changed code that the job accepts.
            load_extra: loads what commits of this run have besides an engine's state; None for nothing.
        """
        self._task = task
        self._measured = measured
        self._own_code = own_code
        self._accepted = accepted
        self._peers = peers
        self._store = Store(f"{task.run}/{COMMITS}", retry=retry)
        self._checkpoint = checkpoint
        self._raw = not task.evaluate_only
        self._load_extra = load_extra

    def open(self, step: int) -> tuple[CommitManifest, Reader]:
        """Open the commit of a step.

        Raises:
            CorruptCommit: if the commit existed only in the memory of nodes, and they do not return it.
        """
        if self._peers is not None:
            with contextlib.suppress(OSError):  # lost nodes: the store has the commit too
                snapshot = self._peers.manifest(step)
                return snapshot, self._peers.reader(snapshot, self._store)
        try:
            manifest = self._store.manifest(step)
        except InputError:
            if self._peers is None or step in self._store.steps():
                raise
            problem = (
                f"the checkpoint at step {step} was only in the memory of nodes, which no longer return it"
            )
            raise CorruptCommit(problem, step) from None
        return manifest, weights_of(self._store, manifest, self._checkpoint, self._raw)

    def restore(self, step: int, engine: Engine) -> tuple[TrainingProgress, dict[str, Any]]:
        """Load the commit of a step into an engine.

        Args:
            step: the step of the commit.
            engine: the engine, whose state is replaced.

        Returns:
            The progress of the run, and facts about the weights for a row of an evaluation.

        Raises:
            CorruptCommit: with the step, from which the controller restores the commit before it.
            InputError: the user's own code has changed since the commit.
        """
        try:
            manifest, reader = self.open(step)
            check_same_code(self._own_code, self._accepted, manifest.meta.get(CODE) or {}, self._task.run)
            engine.load(reader)
            # What another run generated ahead belongs to that run's rollouts.
            if self._load_extra and self._raw and (manifest.meta.get(CONTINUED) or {}).get("step") != step:
                self._load_extra(reader)
            facts = average_fields(reader)
        except CorruptCommit as error:
            raise CorruptCommit(str(error), step) from None
        progress = TrainingProgress.of_commit(
            step=manifest.step,
            position=manifest.position,
            receipt=manifest.receipt,
            meta=manifest.meta,
            skips=self._task.skips,
            measured=self._measured,
        )
        return progress, facts

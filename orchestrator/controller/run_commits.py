"""The commits that a run can start from, on storage and in the memory of other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from orchestrator.checkpoint import identity
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import RunIdentity
from orchestrator.checkpoint.last_commit import LastCommit, last_commit, refuse_lost
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.peer_memory import PeerMemory, rewind_all, rewind_memory
from orchestrator.checkpoint.reverify import Doubted
from orchestrator.data.samples.skips import Skip, is_before, merged
from orchestrator.storage.run_directory import RunDir


class RunCommits:
    """Finds the newest sound commit of a run, and removes later ones.

    Attributes:
        store: the commits on storage.
        newest: the newest commit when this controller started, None if the run had none.
        extension: how the job has more steps than the run had; None if it has as many.
        fenced_attempt: the last attempt that was allowed to commit, see `Store.fence`.
    """

    def __init__(self, job: RunIdentity, steps: int, run: RunDir) -> None:
        """Take up the commits of a run, new or old.

        Args:
            job: what makes two jobs the same run.
            steps: steps of the run.
            run: the run directory.

        Raises:
            InputError: the directory belongs to another run. Nothing has been written in that case.
        """
        self._steps = steps
        self._run = run
        self.newest, self.extension = identity.take_up(job, run)
        self.store = Store(run.commits)
        self.fenced_attempt = self.store.fenced()
        self._doubted = Doubted(self.store)
        self._peers: PeerMemory | None = None
        """Commits in the memory of other nodes (snapshot servers); None without any."""
        self._peer_token = ""
        self._peer_servers: tuple[Mapping[str, str], ...] = ()
        self._shards = ""
        """The digest of the run's token shards, empty until `same_shards`."""

    @property
    def attempt(self) -> int:
        """The attempt of the newest commit, 0 without one."""
        return self.newest.meta.get("attempt", 0) if self.newest else 0

    @property
    def data(self) -> str:
        """The URI of the prepared data that the newest commit was trained on, empty without one."""
        return self.newest.meta.get("data", "") if self.newest else ""

    @property
    def base(self) -> dict[str, Any]:
        """The pretrained weights that the newest commit began with; empty without any."""
        return (self.newest.meta.get(identity.BASE) if self.newest else None) or {}

    @property
    def teacher(self) -> dict[str, Any]:
        """The teacher that the newest commit learned from; empty without one."""
        return identity.teacher_of(self.newest.meta) if self.newest else {}

    def same_shards(self, digest: str, data: str) -> str:
        """Return `digest`, of the token shards at `data`. Raises InputError if the run began with other shards."""
        identity.check_shards(self.newest, digest, data)
        if self._shards not in ("", digest):
            raise identity.wrong_shards(data)
        self._shards = digest
        return digest

    def use_snapshot_servers(self, token: str, servers: Sequence[Mapping[str, str]]) -> None:
        """Look for commits in the memory of these snapshot servers first.

        Args:
            token: authenticates this run to the servers.
            servers: {"node", "address"} of each server.
        """
        self._peer_token = token
        self._peer_servers = tuple(servers)
        self.leave_out(frozenset())

    def leave_out(self, lost: Set[str]) -> None:
        """Do not wait for the snapshot servers on the `lost` nodes, which do not answer."""
        addresses = [server["address"] for server in self._peer_servers if server["node"] not in lost]
        if self._peers is not None:
            self._peers.close()
        self._peers = PeerMemory(self._peer_token, addresses) if addresses else None

    def last(
        self, bad: frozenset[int], doubtful_after: int | None, skips: Sequence[Skip]
    ) -> tuple[LastCommit, list[str]]:
        """Return the newest commit that the run can start from, and a line for each that is passed over or doubted.

        Passed over are damaged commits, commits that used samples which must be left out, and commits of the learning
        rate's decay before an extension of the run.

        Args:
            bad: steps of commits that a rank reported as damaged. Each is verified first.
            doubtful_after: the step after which commits may be wrong, see `State`.
            skips: the samples that must be left out.
        """
        damaged, notes = self._doubted.damaged(bad)

        def is_usable(commit: CommitManifest) -> bool:
            """Whether the commit is not in doubt, belongs to the same job and leaves out the same samples."""
            is_in_doubt = doubtful_after is not None and commit.step > doubtful_after
            its_skips = merged(commit.meta.get("skips", ()))
            return (
                not is_in_doubt
                and identity.is_shared(commit, self._steps)
                and is_before(commit.position, its_skips, skips)
            )

        result = last_commit(self._peers, self.store, damaged, is_usable)
        return result, notes + [note for note in result.notes if note not in notes]

    def fence(
        self, bad: frozenset[int], attempt: int, doubtful_after: int | None, skips: Sequence[Skip]
    ) -> tuple[LastCommit, list[str]]:
        """Let only `attempt` commit from now on, and return the commit that it starts from.

        Processes that are left of earlier attempts are fenced off.

        Args: as in `last`; `attempt` is the one that starts from the commit.

        Returns:
            As `last`.

        Raises:
            InputError: the run had commits, and none of them can be used (see `refuse_lost`).
        """
        self._run.require_lock()
        self.fenced_attempt = max(self.fenced_attempt, attempt)
        self.store.fence(attempt)
        if bad:  # the copy in memory may be the damaged one
            rewind_memory(self._peers, min(bad) - 1, attempt)
        if doubtful_after is not None:
            rewind_memory(self._peers, doubtful_after, attempt)
        result, notes = self.last(bad, doubtful_after, skips)
        if result.commit is None and not result.left_out:
            refuse_lost(self._run, result.unsound)
        return result, notes

    def remove_later(self, result: LastCommit, attempt: int) -> None:
        """Remove every commit after the one that `attempt` starts from, on storage and in memory."""
        commit = result.commit
        rewind_all(
            self._peers,
            self.store,
            commit.step if commit else -1,
            attempt,
            commit if result.in_memory else None,
        )

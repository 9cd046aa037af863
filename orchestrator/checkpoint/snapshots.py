"""Commits in the memory of peers, and which of several stores to restore from."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.snapshot_backend import peers_uri
from orchestrator.checkpoint.store import Store
from orchestrator.storage.retry import Retry


def peer_store(token: str, holders: list[str], write_to: list[str], attempt: str = "") -> Store:
    """A store in the memory of holders: quick to give up, since what is in it is also elsewhere.

    Args:
        token: what the holders were started with.
        holders: the addresses of all of them, nearest first.
        write_to: those that keep this writer's shards; name one on another node.
        attempt: as in `Store`.
    """
    retry = Retry(attempts=2, first=0.05, deadline=10.0)
    return Store(peers_uri(token, holders, write_to), attempt=attempt, retry=retry, timeout=10.0)


def newest(
    stores: Sequence[Store], at_most: int | None = None, deep: bool = True
) -> tuple[Store, CommitManifest, list[str]] | None:
    """The newest sound commit of several stores; of equal ones that of the store named first.

    Put peer memory first and the durable store last. A store that cannot be reached is passed over, except the
    last one, whose error is raised.

    Returns:
        The store, the manifest, and a line for everything passed over; None if no store has a sound commit.
    """
    best: tuple[Store, CommitManifest] | None = None
    notes: list[str] = []
    for store in stores:
        try:
            found = store.latest(at_most, deep)
        except OSError as error:
            if store is stores[-1]:
                raise
            notes.append(f"{store.place}: {error}")
            continue
        notes += [f"{store.place}: {reason}" for _, reason in store.skipped]
        if found is not None and (best is None or found.step > best[1].step):
            best = store, found
    return None if best is None else (*best, notes)

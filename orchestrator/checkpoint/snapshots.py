"""Stores in the memory of other nodes, and the choice of the store to restore from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.retention import rewind
from orchestrator.checkpoint.snapshot_backend import peers_uri
from orchestrator.checkpoint.store import Store
from orchestrator.storage.retry import Retry


def peer_store(token: str, servers: list[str], write_to: list[str], attempt: str = "") -> Store:
    """A store in the memory of snapshot servers. It gives up quickly, since the durable store has its commits too.

    Args:
        token: the token that the servers were started with.
        servers: the addresses of all of them, nearest first.
        write_to: those that keep this writer's shards; they should be on other nodes.
        attempt: as in `Store`.
    """
    retry = Retry(attempts=2, first=0.05, deadline=10.0)
    return Store(peers_uri(token, servers, write_to), attempt=attempt, retry=retry, timeout=10.0)


def rewind_memory(peers: Store | None, step: int) -> None:
    """Remove what is newer than `step` from the memory of peers, of those that can be reached."""
    if peers is not None:
        with contextlib.suppress(OSError):
            rewind(peers, step)


def rewind_all(peers: Store | None, durable: Store, step: int) -> None:
    """Remove what is newer than `step` from the memory of peers, see `rewind_memory`, and from the durable store."""
    rewind_memory(peers, step)
    rewind(durable, step)


def newest_commit(
    stores: Sequence[Store], at_most: int | None = None, deep: bool = True
) -> tuple[Store, CommitManifest, list[str]] | None:
    """The newest sound commit of several stores; of equally new ones that of the first store.

    Give peer memory first and the durable store last. A store that cannot be reached is skipped, except the last one,
    whose error is raised. For `at_most` and `deep` see `Store.latest`.

    Returns:
        The store, the manifest, and a line for every store or commit that was skipped; None if there is no sound
        commit.
    """
    best: tuple[Store, CommitManifest] | None = None
    notes: list[str] = []
    for store in stores:
        try:
            found = store.latest(at_most, deep)
        except OSError as error:
            if store is stores[-1]:
                raise
            notes.append(f"{store.location}: {error}")
            continue
        notes += [f"{store.location}: step {step}: {why}" for step, why in store.skipped]
        if found is not None and (best is None or found.step > best[1].step):
            best = store, found
    return None if best is None else (*best, notes)

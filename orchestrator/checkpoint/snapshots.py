"""Stores in the memory of other nodes, and the search for the newest commit among several stores."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.retention import rewind
from orchestrator.checkpoint.snapshot_backend import peers_uri
from orchestrator.storage.retry import Retry


def peer_store(token: str, servers: list[str], write_to: list[str], attempt: str = "") -> Store:
    """Return a store in the memory of snapshot servers. It gives up quickly, because there is also the durable store.

    Args:
        token: the token that the servers were started with.
        servers: the addresses of all of them, nearest first.
        write_to: the servers that keep this writer's shards; they should be on other nodes.
        attempt: as in `Store`.
    """
    retry = Retry(attempts=2, first=0.05, deadline=10.0)
    return Store(peers_uri(token, servers, write_to), attempt=attempt, retry=retry, timeout=10.0)


def rewind_memory(peers: Store | None, step: int) -> None:
    """Remove everything after `step` from the memory of the peers that are reachable."""
    if peers is not None:
        with contextlib.suppress(OSError):
            rewind(peers, step)


def rewind_all(peers: Store | None, durable: Store, step: int) -> None:
    """Remove everything after `step` from the memory of reachable peers and from the durable store."""
    rewind_memory(peers, step)
    rewind(durable, step)


def newest_commit(
    stores: Sequence[Store], at_most: int | None = None, deep: bool = True
) -> tuple[Store, CommitManifest, list[str]] | None:
    """Return the newest sound commit of several stores. For equally new ones the first store wins.

    Give peer memory first and the durable store last. An unreachable store is skipped, except the last one, whose error
    is raised. For `at_most` and `deep` see `Store.latest`.

    Returns:
        The store, the manifest, and a line for every store or commit that was skipped; None without a sound commit.
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

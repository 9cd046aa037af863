"""Real nodes on this machine for tests that look at a cluster from the outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cluster.local.local_cluster import LocalCluster, NodeSpec, down, up


@contextlib.contextmanager
def two_nodes(name: str) -> Iterator[LocalCluster]:
    """A head and two nodes of one processor each; what an earlier test has left of that name is ended first."""
    down(name)
    try:
        yield up(name, [NodeSpec("", ""), NodeSpec("", "")])
    finally:
        down(name)

"""Real Ray nodes on this machine: a head without processors, and workers of one processor each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
"""A dead node is noticed in some seconds instead of the default's twenty, so that tests are short."""


@contextlib.contextmanager
def three_nodes() -> Iterator[Cluster]:
    """A head at 127.0.0.10 and two workers at .11 and .12; all processes are gone afterwards."""
    found = Cluster()
    try:
        for number in range(3):
            found.add_node(
                num_cpus=min(number, 1),
                node_ip_address=f"127.0.0.{10 + number}",
                object_store_memory=100 * 2**20,
                include_dashboard=False,
                **({"_system_config": HEALTH} if number == 0 else {}),
            )
        found.wait_for_nodes(timeout=60)
        yield found
    finally:
        found.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three nodes for one test, which may break them."""
    with three_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """Three nodes for the tests of a module that break none."""
    with three_nodes() as found:
        yield found

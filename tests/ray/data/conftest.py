from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from cluster.workers.ray_internals import lean_start


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """A Ray of two CPUs in this process."""
    with lean_start():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=2 * 10**8,
            _node_ip_address="127.0.0.1",
            logging_level="ERROR",
        )
    yield
    ray.shutdown()

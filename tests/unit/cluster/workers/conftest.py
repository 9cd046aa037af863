from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.workers.heartbeat import HeartbeatServer


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    """Listens for ranks on loopback."""
    found = HeartbeatServer("127.0.0.1")
    yield found
    found.close()

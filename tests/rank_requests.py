"""What a fork server is asked for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.worker_context import RankInfo


def rank(server: HeartbeatServer, target: str = "targets:wait", **config: Any) -> dict[str, Any]:
    """The request for the only rank of a gang, which reports to that server."""
    token = server.expect(["local"])
    rank_info = dataclasses.asdict(RankInfo(0, 1, 0, "127.0.0.1", 1))
    address = server.address
    return {"rank_info": rank_info, "target": target, "config": config, "server": address, "token": token}


def wait_for(seen: Callable[[], Any]) -> None:
    """Return once it is seen; fails after 20 seconds."""
    deadline = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.005)

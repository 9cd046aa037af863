"""Weights on their way from the ranks to rollout workers: by tensor name, through a server on each node.

Every rank sends the pieces that it holds, so no rank needs the whole model, and each byte goes to a node once. The
workers of a node read them there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.checkpoint.connections import Connections
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.replica import WEIGHTS, PieceLocation, Replica, location_of
from orchestrator.train.rollouts.work_queue import TIMEOUT


class NoWeights(ConnectionError):
    """No server has the weights of a version, or can take them."""


class WeightSender:
    """Sends the weights of an engine, version after version. Every rank has one."""

    def __init__(self, token: str, rank: int, world: int) -> None:
        """`token` is that of the servers."""
        self._connections = Connections(token, TIMEOUT)
        self._name = str(rank)
        self._world = world

    def send(
        self,
        engine: Engine,
        servers: Sequence[dict[str, str]],
        version: int,
        attempt: int,
        spared: int | None = None,
    ) -> list[dict[str, str]]:
        """Send this rank's weights to every server that answers. All ranks have sent theirs when this returns.

        The servers forget earlier versions but `spared`, and what earlier attempts sent.

        Args:
            engine: has the weights.
            servers: {"node", "address"} of servers; other ranks may know others, because workers come and go.
            version: the number of these weights.
            attempt: the attempt of the run.
            spared: an earlier version that rollout workers still generate with; None without one.

        Returns:
            The servers that some rank has sent weights to, in the same order on every rank.

        Raises NoWeights if no server took this rank's.
        """
        pieces = [piece for piece in engine.state() if piece.name.startswith(WEIGHTS)]
        buffers = [_bytes_of(piece.data.detach().to("cpu", torch.float32)) for piece in pieces]
        note = {"version": version, "rank": int(self._name), "world": self._world}
        text = json.dumps({**note, "places": [location_of(piece) for piece in pieces]}).encode()
        request = {
            "do": "keep", "step": version, "name": self._name, "attempt": attempt, "complete": version,
            "spared": spared, "note": len(text),
        }  # fmt: skip
        problems = []
        accepted = []
        for server in servers:
            try:
                self._connections.ask(server["address"], request, text, *buffers)
            except OSError as error:
                problems.append(f"{server['node']}: {error}")
            else:
                accepted.append(server)
        if not accepted:
            reason = "; ".join(problems) or "no server is running"
            raise NoWeights(f"no server of weights took version {version} from rank {self._name}: {reason}")
        # No unit of work names weights that are still on their way.
        return list(
            {
                chosen["address"]: chosen for rank_servers in gather_json(accepted) for chosen in rank_servers
            }.values()
        )


def read_weights(replica: Replica, token: str, servers: Sequence[dict[str, str]], version: int) -> None:
    """Fill a replica with the weights of a version.

    Args:
        replica: the model.
        token: that of the servers.
        servers: {"node", "address"} of each, nearest first.
        version: the version.

    Raises NoWeights if the servers that answer do not have all of it.
    """
    connections = Connections(token, TIMEOUT)
    problems = []
    missing: set[int] | None = None
    for server in servers:
        if missing == set():
            break
        address = server["address"]
        try:
            notes = json.loads(connections.ask(address, {"do": "notes", "wait": 0.0})["bytes"])
            for note in notes:
                if note["version"] != version:
                    continue
                missing = set(range(note["world"])) if missing is None else missing
                if note["rank"] in missing:
                    _read_part(replica, connections, address, note)
                    missing.remove(note["rank"])
        except OSError as error:
            problems.append(f"{server['node']}: {error}")
    connections.close()
    if missing is None or missing:
        ranks_text = f" of ranks {', '.join(map(str, sorted(missing)))}" if missing else ""
        reason = "; ".join(problems) or "the others do not have it"
        raise NoWeights(f"no server has the weights{ranks_text} in version {version}: {reason}")


def _read_part(replica: Replica, connections: Connections, address: str, note: dict[str, Any]) -> None:
    """Fill a replica with the pieces that one rank has sent."""
    offset = 0

    def read(values: Tensor) -> None:
        nonlocal offset
        target = _bytes_of(values)
        request = {"do": "read", "step": note["version"], "name": str(note["rank"]), "offset": offset}
        if len(target):
            size = connections.ask(address, {**request, "count": len(target)}, target=target)["size"]
            if size != len(target):
                raise ConnectionError(f"expected {len(target)} bytes, but received {size}")
        offset += len(target)

    locations = [PieceLocation(name, tuple(start), tuple(extent)) for name, start, extent in note["places"]]
    replica.fill(locations, read)


def _bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; those of a contiguous one are not copied."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data

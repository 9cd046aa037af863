"""Find the Ray cluster that a command uses, and its token, by Ray's own conventions.

RAY_API_SERVER_ADDRESS and RAY_ADDRESS name the address. RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token give
the token. Without an address, the running local cluster is used.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from cluster.local.local_cluster import LocalCluster, find, folder_of

CONNECT_TIMEOUT = 5.0
"""Seconds to wait until a cluster accepts a connection."""


class NoCluster(ConnectionError):
    """No Ray cluster answers at the address, or it refuses the token."""


class NoAddress(NoCluster):
    """No address is given, and no local cluster is running."""


class Connected(NoCluster):
    """This process is connected to Ray already; a process can have one connection only."""


class WrongToken(NoCluster):
    """The cluster refuses this token."""


@dataclass(frozen=True)
class ClusterAddress:
    """The addresses of a cluster."""

    given: str
    """The address as the user gave it."""
    ray: str = ""
    """The address for `ray.init`, empty if only the Jobs API is known."""
    api: str = ""
    """The URL of its Jobs API, empty if Ray must be asked for it."""
    token_path: str = ""
    """The file of the cluster's own token, empty if the user's token is used."""


def resolve_address(address: str | None) -> ClusterAddress:
    """Return the cluster at `address`.

    For None, "" or "auto", use Ray's environment variables, else a running local cluster. Raises NoCluster if there is
    none, or if Ray was imported before RAY_AUTH_MODE was set.
    """
    from_environment = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    wanted = from_environment if address in (None, "", "auto") else str(address)
    local = _local_at(wanted)
    require_token_mode()
    if local is not None:
        return ClusterAddress(wanted or local.address, local.address, local.dashboard, local.token_path)
    if not wanted:
        raise NoAddress("no address is given, and no local cluster is up")
    if "://" in wanted and not wanted.startswith("ray://"):
        return ClusterAddress(
            wanted,
            "" if wanted != from_environment else os.environ.get("RAY_ADDRESS", ""),
            wanted.rstrip("/"),
        )
    return ClusterAddress(
        wanted, wanted, os.environ.get("RAY_API_SERVER_ADDRESS", "") if wanted == from_environment else ""
    )


def check_reachable(address: str) -> None:
    """Raise NoCluster if `address` is not "host:port", or if nothing listens there. Ray itself would wait minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise NoCluster(f"{address} is not an address: give HOST:PORT, or the URL of a Jobs API")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:  # ValueError: the host is not a legal name
        reason = getattr(error, "strerror", None) or error
        raise NoCluster(f"nobody answers at {address} ({reason})") from None


def require_token_mode() -> None:
    """Turn on token authentication unless RAY_AUTH_MODE is set. Raises NoCluster if Ray was imported before."""
    if os.environ.get("RAY_AUTH_MODE"):
        return
    if "ray" in sys.modules:
        raise NoCluster("Ray was imported without token authentication; set RAY_AUTH_MODE=token first")
    os.environ["RAY_AUTH_MODE"] = "token"


def _local_at(address: str) -> LocalCluster | None:
    """Return the local cluster at an address. For an empty address, any running one, the default name first."""
    try:
        names = sorted(path.name for path in folder_of().parent.iterdir() if path.is_dir())
    except OSError:
        return None
    clusters = [c for name in sorted(names, key=lambda n: n != folder_of().name) if (c := find(name))]
    if not address:
        return clusters[0] if clusters else None
    return next((c for c in clusters if address.rstrip("/") in (c.address, c.dashboard)), None)

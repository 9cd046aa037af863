"""Which Ray cluster a command uses, and its token, by Ray's own conventions.

RAY_API_SERVER_ADDRESS and RAY_ADDRESS give the address; RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token the
token. Without an address, the local cluster that is up is used.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from cluster.local.local_cluster import LocalCluster, find, folder_of

CONNECT_TIMEOUT = 5.0
"""Seconds for a cluster to accept a connection."""


class NoCluster(ConnectionError):
    """No Ray cluster answers at the address, or it refuses the token."""


class NoAddress(NoCluster):
    """No address is given, and no local cluster is up."""


class Connected(NoCluster):
    """This process is connected to Ray already, which it can be once."""


class WrongToken(NoCluster):
    """The cluster refuses this token."""


@dataclass(frozen=True)
class ClusterAddress:
    """A cluster's address as it was given, the address for `ray.init`, the URL of its Jobs API, and the file of a token
    of its own.

    `ray` is empty if only the Jobs API is known; `api` is empty if Ray must be asked for it; `token_path` is empty if
    the token is the user's.
    """

    given: str
    ray: str = ""
    api: str = ""
    token_path: str = ""


def resolve_address(address: str | None) -> ClusterAddress:
    """The cluster at `address`; without one (None, "" or "auto"), that of Ray's variables or the local one.

    Raises NoCluster if there is no cluster, or if Ray was imported without token authentication.
    """
    from_environment = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    given = from_environment if address in (None, "", "auto") else str(address)
    local = _local_at(given)
    require_token_mode()
    if local is not None:
        return ClusterAddress(given or local.address, local.address, local.dashboard, local.token_path)
    if not given:
        raise NoAddress("no address is given, and no local cluster is up")
    if "://" in given and not given.startswith("ray://"):
        return ClusterAddress(
            given, "" if given != from_environment else os.environ.get("RAY_ADDRESS", ""), given.rstrip("/")
        )
    return ClusterAddress(
        given, given, os.environ.get("RAY_API_SERVER_ADDRESS", "") if given == from_environment else ""
    )


def check_reachable(address: str) -> None:
    """Raises NoCluster if `address` is not "host:port", or nothing listens there, for which Ray itself would wait
    minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise NoCluster(f"{address} is no address: give HOST:PORT, or the URL of a Jobs API")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:  # a host may have no form that a name can have
        reason = getattr(error, "strerror", None) or error
        raise NoCluster(f"nobody answers at {address} ({reason})") from None


def require_token_mode() -> None:
    """Turn on token authentication unless RAY_AUTH_MODE is set. Raises NoCluster if Ray was imported before."""
    if os.environ.get("RAY_AUTH_MODE"):
        return
    if "ray" in sys.modules:
        raise NoCluster("Ray was imported without token authentication; set RAY_AUTH_MODE=token first")
    os.environ["RAY_AUTH_MODE"] = "token"


def _local_at(given: str) -> LocalCluster | None:
    """The cluster of `cluster up` at that address; for an empty address any one, the default name first."""
    try:
        names = sorted(path.name for path in folder_of().parent.iterdir() if path.is_dir())
    except OSError:
        return None
    clusters = [c for name in sorted(names, key=lambda n: n != folder_of().name) if (c := find(name))]
    if not given:
        return clusters[0] if clusters else None
    return next((c for c in clusters if given.rstrip("/") in (c.address, c.dashboard)), None)

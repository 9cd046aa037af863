"""Which Ray cluster a command means, and its token, by Ray's own conventions.

RAY_API_SERVER_ADDRESS and RAY_ADDRESS say where, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token hold the
token. Where they say nothing, the local cluster that is up is meant.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from cluster.local.local_cluster import LocalCluster, find, folder_of, user_token

CONNECT_TIMEOUT = 5.0
"""Seconds for a cluster to accept a connection."""


class NoCluster(ConnectionError):
    """There is no Ray cluster at the address, or it refuses this token."""


@dataclass(frozen=True)
class ClusterAddress:
    """A cluster: its address as it was said, where Ray answers (for `ray.init`) and where its Jobs API does.

    `ray` is empty if only the Jobs API is known, `api` if Ray must be asked for it.
    """

    said: str
    ray: str = ""
    api: str = ""


def place_of(address: str | None) -> ClusterAddress:
    """The cluster at `address`, or the one that is meant without. This process then holds its token.

    Raises NoCluster if there is none to be meant, or if Ray was imported without token authentication.
    """
    variables = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    said = variables if address in (None, "", "auto") else str(address)
    local = _local_at(said)
    require_token_mode()
    if local is not None:
        if not user_token():
            os.environ["RAY_AUTH_TOKEN_PATH"] = f"{local.folder}/token"
        return ClusterAddress(said or local.address, local.address, local.dashboard)
    if not said:
        raise NoCluster("no address is given, and no local cluster is up")
    if "://" in said and not said.startswith("ray://"):
        return ClusterAddress(
            said, "" if said != variables else os.environ.get("RAY_ADDRESS", ""), said.rstrip("/")
        )
    return ClusterAddress(
        said, said, os.environ.get("RAY_API_SERVER_ADDRESS", "") if said == variables else ""
    )


def require_answer(address: str) -> None:
    """Do not let Ray wait minutes for a host:port where nobody listens. Raises NoCluster."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoCluster(f"nobody answers at {address} ({why})") from None


def require_token_mode() -> None:
    """Speak to clusters with a token, unless RAY_AUTH_MODE says otherwise. Raises NoCluster if it is too late."""
    if os.environ.get("RAY_AUTH_MODE"):
        return
    if "ray" in sys.modules:
        raise NoCluster("Ray was imported without token authentication; set RAY_AUTH_MODE=token first")
    os.environ["RAY_AUTH_MODE"] = "token"


def _local_at(said: str) -> LocalCluster | None:
    """The cluster of `cluster up` at that address; any one for no address, the default one first."""
    try:
        names = sorted(path.name for path in folder_of().parent.iterdir() if path.is_dir())
    except OSError:
        return None
    clusters = [c for name in sorted(names, key=lambda n: n != folder_of().name) if (c := find(name))]
    if not said:
        return clusters[0] if clusters else None
    return next((c for c in clusters if said.rstrip("/") in (c.address, c.dashboard)), None)

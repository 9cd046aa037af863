"""Free TCP ports of this machine."""

from __future__ import annotations

import socket


def free_port(host: str, preferred: int) -> int:
    """The preferred port of the address `host` if nobody listens there, else any free one."""
    if _is_free(host, preferred):
        return preferred
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

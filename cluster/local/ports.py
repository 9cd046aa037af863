"""Addresses and free TCP ports of this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def is_own(address: str) -> bool:
    """Return whether it is an IPv4 address of this machine."""
    try:
        if ipaddress.IPv4Address(address).is_loopback:
            return True
    except ValueError:
        return False
    return any(address == each.address for addresses in psutil.net_if_addrs().values() for each in addresses)


def free_port(host: str, preferred: int = 0) -> int:
    """Return the preferred port of the address `host` if it is free, else any free one."""
    if preferred and _is_free(host, preferred):
        return preferred
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

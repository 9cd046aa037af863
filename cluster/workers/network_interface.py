"""Which network interface has an address: libraries that are told none ask for the address of the host's name, which
may not be known, or be another one."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables by which the libraries are told."""
LOOPBACK = "lo"
PLACE = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""Offset and size of the address, by its family: sin_port, or sin6_port and sin6_flowinfo, come before it."""


class _Address(ctypes.Structure):
    """An entry of the list that getifaddrs(3) makes."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("to", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interface_of(address: str) -> str:
    """The interface of this machine that has the address, or that of a host's name; empty if none has, as behind a
    translation of addresses, or nobody knows the name."""
    try:
        wanted = {ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(address, None)}
    except socket.gaierror:
        return ""
    if any(each.is_loopback for each in wanted):
        return LOOPBACK  # all of 127.0.0.0/8, of which the system names one
    return next((name for name, found in addresses() if found in wanted), "")


def addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address) of this machine, as getifaddrs(3) says."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        at = first
        while at:
            if at.contents.address:
                family = ctypes.c_ushort.from_address(at.contents.address).value
                if family in PLACE:
                    skip, size = PLACE[family]
                    raw = ctypes.string_at(at.contents.address + skip, size)
                    yield at.contents.name.decode(), ipaddress.ip_address(raw)
            at = at.contents.next
    finally:
        library.freeifaddrs(first)


def use_interface_of(address: str) -> str:
    """Have gloo and NCCL talk through the interface that has this address; returns its name, empty if none has it.

    What is set already holds: a machine may have networks that only its owner knows.
    """
    name = interface_of(address)
    if name == LOOPBACK:
        os.environ[GLOO] = LOOPBACK
    if name:
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")  # this one and none that begins so
    return name

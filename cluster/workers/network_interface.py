"""Find the network interface that has an address, and set it for gloo and NCCL.

Without it these libraries look up the address of the host's name, which may be unknown or a different one.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
"""The variables that name the interface to the libraries."""
LOOPBACK = "lo"
PLACE = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""The offset and the size of an address in its structure, by family: ports and flow information come first."""


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
    """Return the interface of this machine that has an address, given as an IP address or a host name.

    Returns an empty string if no interface has it, for example behind NAT, or if the name is unknown.
    """
    try:
        targets = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
    except socket.gaierror:
        return ""
    if any(each.is_loopback for each in targets):
        return LOOPBACK  # it has all of 127.0.0.0/8, although the system lists one address
    return next((name for name, each in addresses() if each in targets), "")


def addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield each (interface, address) of this machine, from getifaddrs(3)."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        at = first
        while at:
            if at.contents.address:
                # The first field of sockaddr on Linux is the family (sa_family_t); elsewhere a length comes first.
                family = ctypes.c_ushort.from_address(at.contents.address).value
                if family in PLACE:
                    skip, size = PLACE[family]
                    raw = ctypes.string_at(at.contents.address + skip, size)
                    yield at.contents.name.decode(), ipaddress.ip_address(raw)
            at = at.contents.next
    finally:
        library.freeifaddrs(first)


def use_interface_of(address: str) -> str:
    """Make gloo and NCCL use the interface that has this address, and return its name; empty if no interface has it.

    Variables that are set already stay, because a user may know better which network to use.
    """
    name = interface_of(address)
    if name == LOOPBACK:
        os.environ[GLOO] = LOOPBACK
    if name:
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")  # "=" demands this exact name
    return name

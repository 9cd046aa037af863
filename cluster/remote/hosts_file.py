"""The machines of a cluster, one a line: `[user@]host [cpus=N] [gpus=N] [address=IP]`."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path

MOST = 1024
"""Largest number of lines."""


class WrongHosts(ValueError):
    """A file of hosts that cannot be used; the line says where and why."""


@dataclass(frozen=True)
class Host:
    """A machine by the name that ssh reaches it by, with what its node offers; None for what it has. address is where
    the others reach it, empty for where ssh does."""

    name: str
    cpus: float | None = None
    gpus: float | None = None
    address: str = ""


def read_hosts(path: Path) -> list[Host]:
    """The hosts in a file; empty lines and what follows a # do not count. Raises WrongHosts, or OSError."""
    found: list[Host] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        if any(host.name == other.name for other in found):
            raise WrongHosts(f"{path}:{number}: {host.name} is there twice; name each machine once")
        found.append(host)
    if not 1 <= len(found) <= MOST:
        raise WrongHosts(f"{path}: has {len(found)} hosts; give 1 to {MOST}, one a line")
    return found


def _host(words: list[str], where: str) -> Host:
    name, *rest = words
    if name.startswith("-"):  # which ssh would take for an option
        raise WrongHosts(f"{where}: {name!r} is no host; write [user@]host")
    offers: dict[str, float] = {}
    address = ""
    for word in rest:
        key, _, value = word.partition("=")
        if key in ("cpus", "gpus"):
            offers[key] = _number(value, f"{where}: {word}")
        elif key == "address":
            address = _address(value, f"{where}: {word}")
        else:
            raise WrongHosts(f"{where}: {word!r} is not known; write cpus=N, gpus=N or address=IP")
    return Host(name, offers.get("cpus"), offers.get("gpus"), address)


def _number(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 10**6:
        raise WrongHosts(f"{where}: is no number of them; write for example cpus=16")
    return found


def _address(text: str, where: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise WrongHosts(f"{where}: is no IPv4 address; write for example address=10.0.0.7") from None

"""Read the file with the machines of a cluster, one per line: `[user@]host [cpus=N] [gpus=N] [address=IP]`."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path

MOST = 1024
"""The largest number of hosts."""


class WrongHosts(ValueError):
    """The file of hosts cannot be used. The message says where and why."""


@dataclass(frozen=True)
class Host:
    """A machine of the cluster."""

    name: str
    """The name by which ssh reaches it."""
    cpus: float | None = None
    """The CPUs that its node offers, None for all."""
    gpus: float | None = None
    """The GPUs that its node offers, None for all."""
    address: str = ""
    """The address at which other machines reach it, empty for the one that ssh uses."""


def read_hosts(path: Path) -> list[Host]:
    """Read the hosts in a file, without empty lines and comments (#). Raises WrongHosts or OSError."""
    result: list[Host] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        if any(host.name == other.name for other in result):
            raise WrongHosts(f"{path}:{number}: {host.name} is there twice; name each machine once")
        result.append(host)
    if not 1 <= len(result) <= MOST:
        raise WrongHosts(f"{path}: has {len(result)} hosts; give 1 to {MOST}, one per line")
    return result


def _host(words: list[str], where: str) -> Host:
    name, *rest = words
    if name.startswith("-"):  # ssh would take it for an option
        raise WrongHosts(f"{where}: {name!r} is not a host; write [user@]host")
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
        result = float(text)
    except ValueError:
        result = math.nan
    if not 0 <= result <= 10**6:
        raise WrongHosts(f"{where}: is not a number from 0 to 1000000; write for example cpus=16")
    return result


def _address(text: str, where: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise WrongHosts(f"{where}: is not an IPv4 address; write for example address=10.0.0.7") from None

"""Check what this machine has and what it lacks for runs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cluster.workers.machine import host_memory

PACKAGES = ("torch", "ray", "transformers", "deepspeed", "mlflow", "fsspec", "s3fs", "tokenizers")
LEAST_MEMORY = 6 * 2**30
"""Bytes of memory below which a warning is given."""
LEAST_DISK = 5 * 2**30
"""Bytes of free disk below which a warning is given."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    `verdict` is ok, warning (some feature will not work), missing (no run will work) or wrong (a device computes
    wrongly).
    """

    verdict: str
    what: str
    found: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return asdict(self)

    def row(self) -> list[str]:
        """Return the finding as a row of a table."""
        return [self.verdict, self.what, self.found, self.hint]


def examine() -> list[Finding]:
    """Check everything that a run needs."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _machine,
        _devices,
        _compiler,
        _loopback,
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("ok" if fits else "missing", "Python", version, "" if fits else "use Python 3.11 to 3.13")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, "not installed", "run make install")


def _machine() -> Iterator[Finding]:
    memory = round(host_memory())
    free = shutil.disk_usage(os.getcwd()).free
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    yield Finding("ok", "CPUs", str(os.cpu_count()))
    yield _enough("memory", memory, LEAST_MEMORY, "the quickstart needs 6 GiB")
    yield _enough("free disk here", free, LEAST_DISK, "free some space for checkpoints")
    yield _enough("shared memory", shm, 2**29, "raise the size of /dev/shm: Ray keeps its objects there")


def _enough(resource: str, bytes_: int, minimum: int, hint: str) -> Finding:
    fits = bytes_ >= minimum
    return Finding("ok" if fits else "warning", resource, f"{bytes_ / 2**30:.1f} GiB", "" if fits else hint)


def _devices() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("ok", "GPUs", ", ".join(names))
        backend = "NCCL" if torch.distributed.is_nccl_available() else "none for CUDA"
    else:
        yield Finding("ok", "GPUs", "none: ranks run on CPUs, with gloo")
        backend = "gloo" if torch.distributed.is_gloo_available() else "none"
    is_supported = backend in ("NCCL", "gloo")
    yield Finding(
        "ok" if is_supported else "missing",
        "process groups",
        backend,
        "" if is_supported else "install another torch",
    )


def _compiler() -> Iterator[Finding]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    hint = "" if compiler else "install g++: DeepSpeed's operators and torch.compile need it"
    yield Finding("ok" if compiler else "warning", "C++ compiler", compiler or "none", hint)


def _loopback() -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
        yield Finding("ok", "loopback", "127.0.0.0/8")
    except OSError as error:
        yield Finding(
            "missing", "loopback", str(error), "embedded Ray listens on 127.0.0.2: use Linux, or --address"
        )

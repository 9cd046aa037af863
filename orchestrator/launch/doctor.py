"""Check what this machine has and what it lacks for runs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cluster.workers.machine import host_memory

PACKAGES = ("torch", "ray", "transformers", "deepspeed", "mlflow", "fsspec", "s3fs", "tokenizers", "pydantic")
PROJECT = "training-orchestrator"
"""The name under which this project is installed."""
LEAST_MEMORY = 6 * 2**30
"""Bytes of memory below which a warning is given."""
LEAST_DISK = 5 * 2**30
"""Bytes of free disk below which a warning is given."""


@dataclass(frozen=True)
class Known:
    """Versions of libraries that are known to behave differently together.

    Attributes:
        versions: the versions of each library, as a specifier such as <5.3. All must apply.
        does: what is different.
        hint: what to do.
    """

    versions: Mapping[str, str]
    does: str
    hint: str

    @property
    def libraries(self) -> str:
        """The libraries with their versions, in one line."""
        return " with ".join(f"{name}{versions}" for name, versions in self.versions.items())

    def is_here(self) -> bool:
        """Return whether these versions are installed."""
        try:
            installed = {name: importlib.metadata.version(name) for name in self.versions}
        except importlib.metadata.PackageNotFoundError:
            return False
        return are_among(installed, self.versions)


def are_among(installed: Mapping[str, str], versions: Mapping[str, str]) -> bool:
    """Return whether all of these libraries are installed, in these versions.

    Args:
        installed: the installed version of each library.
        versions: a specifier for each library.
    """
    return all(
        name in installed and SpecifierSet(bounds).contains(installed[name], prereleases=True)
        for name, bounds in versions.items()
    )


KNOWN: tuple[Known, ...] = (
    Known(
        {"transformers": "<5.5"},
        "Gemma 2 and gpt-oss's class for sequences have other logits there than here",
        "run make install, which takes a newer one",
    ),
)
"""What `make test-releases` has found, see docs/peers.md."""


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
    allowed = _allowed()
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, "not installed", "run make install")
            continue
        bounds = allowed.get(name, SpecifierSet())
        fits = bounds.contains(version, prereleases=True)
        hint = "" if fits else f"this project is tested with {name}{bounds}: run make install"
        yield Finding("ok" if fits else "warning", name, version, hint)
    for known in KNOWN:
        if known.is_here():
            yield Finding("warning", known.libraries, known.does, known.hint)


def _allowed() -> dict[str, SpecifierSet]:
    """Return the versions that this project allows, by the name of each library; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(PROJECT) or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    needs = [requirement for requirement in map(Requirement, lines) if requirement.marker is None]
    return {need.name: need.specifier for need in needs}


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

"""Connect to Ray: to a running cluster, or to a cluster that this process starts for itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import psutil

from cluster.local.address import Connected, NoCluster, WrongToken, check_reachable, resolve_address
from cluster.local.local_cluster import TOKEN, user_token
from cluster.local.node import COMMON, LONG_PATH, WHEN_IDLE
from cluster.local.reaped import reaped
from cluster.workers import ray_internals
from cluster.workers.environment import put_back
from cluster.workers.machine import host_memory, processors_here
from cluster.workers.program import hidden_packages, keeper
from cluster.workers.stop_signals import kept_interruptions

NAMESPACE = "orchestrator"
ON_HEAD = {ray_internals.HEAD: 0.001}
"""A resource that only the head has. Small actors use it, so they never depend on a worker's node or keep it."""
OBJECT_STORE_BYTES = 300 * 2**20
"""The size of the object store. A small one is enough, because token shards go through files."""
LEAST_FREE = 2**25
"""A disk with fewer free bytes is too full to start Ray."""
ANOTHER_FOLDER = "make room there, or set TMPDIR, or RAY_TMPDIR, to a folder where files can be made"
LOOPBACK = "127.0.0.2"
"""The address of an embedded cluster. Ray would replace 127.0.0.1 by the machine's outward address."""


_ALONE = threading.Lock()
"""Held while this process is connected. A process has one connection to Ray, and a second would end the first."""


class NotStarted(RuntimeError):
    """Ray did not start on this machine. `what` says why, and `hint` what may help."""

    def __init__(self, reason: str, hint: str = "try again when this machine has less to do") -> None:
        self.what = f"Ray did not start on this machine: {reason}"
        self.hint = hint
        super().__init__(f"{self.what}; {self.hint}")


@contextlib.contextmanager
def connected_ray(
    address: str | None,
    cpus: float = 0,
    gpus: float = 0,
    node: str | None = None,
    output: TextIO | None = None,
    *,
    packages: Sequence[str],
) -> Iterator[None]:
    """Connect to a cluster, or start an embedded one on loopback that requires a token and ends with this process.

    Args:
        address: the cluster, None to start an embedded one.
        cpus: minimum number of CPUs of an embedded cluster.
        gpus: number of GPUs of an embedded cluster.
        node: the address of the node to connect through, if several are on this machine.
        output: where Ray's messages go, standard error by default.
        packages: the packages whose functions run on the cluster. Workers import them although the working directory
            has a package of that name.

    Raises:
        NoCluster: the cluster does not answer.
        NotStarted: the embedded cluster did not start.
        Connected: this process is connected already.
    """
    if not _ALONE.acquire(blocking=False):
        raise Connected(
            "another thread of this process is connected to Ray, which takes one connection a process"
        )
    try:
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            raise Connected("this process has initialised Ray already, and its connection would be lost")
        with _put_back(), _connection(address, cpus, gpus, node, output=output, packages=packages):
            yield
    finally:
        _ALONE.release()


@contextlib.contextmanager
def _connection(
    address: str | None,
    cpus: float,
    gpus: float,
    node: str | None,
    output: TextIO | None,
    packages: Sequence[str],
) -> Iterator[None]:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
    options |= _worker_options(packages)
    if address is None:
        _require_token()
        options |= {
            "num_cpus": max(int(cpus + 0.999), processors_here()),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_memory": host_memory(),
            "_node_ip_address": LOOPBACK,
            "_system_config": COMMON,
            **({"num_gpus": int(gpus)} if gpus else {}),
        }
    else:
        cluster = resolve_address(address)
        if not cluster.ray:
            raise NoCluster(f"{address} is a Jobs API, and a run needs Ray's own address; use `submit` there")
        if cluster.token_path:  # Ray prefers the other variable
            os.environ.pop("RAY_AUTH_TOKEN", None)
            os.environ["RAY_AUTH_TOKEN_PATH"] = cluster.token_path
        address = cluster.ray
        if _is_host_and_port(address):
            check_reachable(address)
        if node:
            options["_node_ip_address"] = node
    with _own_folder() if address is None else contextlib.nullcontext() as private_folder:
        # Ray makes its folder accessible to everyone, so it gets a subfolder of our private one
        if private_folder:
            options["_temp_dir"] = os.path.join(private_folder.path, "0")
        _connect(address, options)
        import ray

        # Ray prints messages about its nodes, some of them as it ends; standard output is for results.
        with contextlib.redirect_stdout(output or sys.stderr):
            try:
                yield
            finally:
                orphans = _workers() if (died := ray_internals.dead_main_process()) else []
                ray.shutdown()
                for (
                    process
                ) in orphans:  # orphans live on for a while and hold resources that the next ones need
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                if private_folder and died:
                    private_folder.kept = True
                    print(f"Ray's logs are in {private_folder.path}")


@dataclass
class _Folder:
    """The folder of an embedded Ray, and whether it is `kept` for its logs."""

    path: str
    kept: bool = False


@contextlib.contextmanager
def _own_folder() -> Iterator[_Folder]:
    """Make a private folder for the sockets and logs of an embedded Ray.

    In Ray's default folder, other users could replace a socket. The folder is removed at the end, unless its logs
    explain a failure. Raises NotStarted if it cannot be made.
    """
    above = (
        os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    )  # where Ray would make its folder
    try:
        os.makedirs(above, exist_ok=True)
        private_folder = _Folder(tempfile.mkdtemp(prefix="r", dir=os.path.abspath(above)))
    except OSError as error:
        raise NotStarted(f"{above}: {error.strerror}", ANOTHER_FOLDER) from None
    try:
        with reaped(private_folder.path):
            yield private_folder
    except NotStarted as error:
        private_folder.kept = private_folder.path in error.hint
        raise
    finally:
        if not private_folder.kept:
            shutil.rmtree(private_folder.path, ignore_errors=True)


def _not_started(reason: str, folder: str) -> NotStarted:
    """Return the error for a Ray that did not start, by the reason and the state of its folder."""
    if LONG_PATH in reason:
        return NotStarted(reason, "its sockets are below TMPDIR, or RAY_TMPDIR: set it to a shorter path")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < LEAST_FREE:
            return NotStarted(f"the disk of {folder} is full ({reason})", ANOTHER_FOLDER)
    if any(
        os.strerror(number) in reason for number in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
    ):
        return NotStarted(f"{folder}: {reason}", ANOTHER_FOLDER)
    return NotStarted(reason, f"{WHEN_IDLE}; Ray's logs are in {folder}")


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Restore what a connection changes in this process: the token, and the handler of SIGTERM.

    The mode of authentication stays, because Ray reads it once.
    """
    handler = signal.getsignal(signal.SIGTERM)
    ray_internals.forget_token()
    try:
        with put_back(TOKEN):
            yield
    finally:
        ray_internals.forget_token()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _worker_options(packages: Sequence[str]) -> dict[str, Any]:
    """Return the options for Ray's workers if a user's folder could hide one of these packages; empty otherwise.

    Workers search the working directory first. The hook that corrects this delays each worker, so others do without it.
    """
    if not hidden_packages([*sys.path, os.getcwd()], packages):
        return {}
    return {"runtime_env": {"worker_process_setup_hook": keeper(packages)}}


def _connect(address: str | None, options: dict[str, Any]) -> None:
    """Connect, or start a cluster. From then on SIGTERM raises KeyboardInterrupt, until `_put_back` restores it.

    Ray's own handler would exit without a message.
    """
    import ray

    for last in (False, True):
        try:
            lean = ray_internals.lean_start() if address is None else contextlib.nullcontext()
            with kept_interruptions(), lean:
                ray.init(address=address or "local", **options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            break
        except (KeyboardInterrupt, SystemExit):
            ray.shutdown()
            raise KeyboardInterrupt from None
        except Exception as error:  # a bare Exception if the machine was too busy to start a node in time
            reason = " ".join(str(error).split())[:200]
            if address is None and (last or LONG_PATH in reason):
                raise _not_started(reason, options["_temp_dir"]) from None
            if address is not None and "oken" in reason:
                raise WrongToken(f"the Ray cluster at {address} refuses this token") from None
            if last:
                raise NoCluster(f"no Ray cluster answers at {address}: {reason}") from None
            ray.shutdown()


def _workers() -> list[psutil.Process]:
    """Return the worker processes of this process's raylet."""
    raylets = {str(pid) for pid in ray_internals.raylet_pids()}
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_RAYLET_PID") in raylets:
                result.append(process)
    return result


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return "://" not in address and bool(host) and port.isdecimal()


def _require_token() -> None:
    """Turn on token authentication by Ray's own variables, with a fresh token unless the user has one.

    Ray reads the mode once, when it is imported. Raises NoCluster if that has happened without it.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise NoCluster("Ray was imported without token authentication; set RAY_AUTH_MODE=token first")
    os.environ["RAY_AUTH_MODE"] = "token"
    if not user_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

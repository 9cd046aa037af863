"""Ray where the run is: a cluster of its own inside this process, or one that is there already."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import psutil

from cluster.local import reaper
from cluster.local.address import NoCluster, place_of, require_answer

NAMESPACE = "orchestrator"
ON_HEAD = {"node:__internal_head__": 0.001}
"""What only the head has: for small actors that should neither be lost with a worker's machine nor keep it up."""
OBJECT_STORE_BYTES = 300 * 2**20
"""Shards go through files, so a small object store serves."""
LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's outward address; any other loopback address it keeps."""


@contextlib.contextmanager
def ray_at(
    address: str | None,
    cpus: float = 0,
    gpus: float = 0,
    node: str | None = None,
    news: TextIO | None = None,
) -> Iterator[None]:
    """Be connected to the cluster at `address`, or to one that starts here on loopback and ends with this process.

    An embedded cluster has at least `cpus` and `gpus` to schedule on and accepts only holders of its token. `node` is
    the address of the node to be connected by, where several are on this machine. What Ray prints goes to `news`, else
    to standard error. Raises NoCluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
    if address is None:
        _require_token()
        quiet |= {
            "num_cpus": max(int(cpus + 0.999), os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
            **({"num_gpus": int(gpus)} if gpus else {}),
        }
    else:
        place = place_of(address)
        if not place.ray:
            raise NoCluster(f"{address} is a Jobs API, and a run needs Ray's own address; use `submit` there")
        address = place.ray
        if _is_host_and_port(address):
            require_answer(address)
        quiet |= {"_node_ip_address": node} if node else {}
    with _reaped() if address is None else contextlib.nullcontext():
        _connect(address, quiet)
        import ray

        # Ray prints news of its nodes, some of it as it ends; standard output is for results.
        with contextlib.redirect_stdout(news or sys.stderr):
            try:
                yield
            finally:
                orphans = _workers() if fallen() else []
                ray.shutdown()
                for process in orphans:  # they would live on for a while, and hold what the next ones need
                    with contextlib.suppress(psutil.Error):
                        process.kill()


def _connect(address: str | None, options: dict[str, Any]) -> None:
    """Connect, or start a cluster. A signal to end is a KeyboardInterrupt from here on: Ray's own handler would exit
    without a word."""
    import ray

    for last in (False, True):
        try:
            ray.init(address=address or "local", **options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            break
        except (KeyboardInterrupt, SystemExit):
            ray.shutdown()
            raise KeyboardInterrupt from None
        except Exception as error:  # a bare one, if the machine was too busy to start a node in time
            reason = " ".join(str(error).split())[:200]
            if last and address is None:
                raise RuntimeError(f"Ray did not start on this machine: {reason}") from None
            if address is not None and "oken" in reason:
                raise NoCluster(f"the Ray cluster at {address} refuses this token") from None
            if last:
                raise NoCluster(f"no Ray cluster answers at {address}: {reason}") from None
            ray.shutdown()


def fallen() -> str:
    """Which main process of the Ray that this process has started is gone; empty if none is, or if Ray is another's."""
    from ray._private import worker  # no public call tells it

    node: Any = worker._global_node
    gone: list[str] = [kind for kind, _ in node.dead_processes()] if node is not None else []
    return next((kind for kind in gone if kind in ("raylet", "gcs_server")), "")


def _workers() -> list[psutil.Process]:
    """Ray's workers of the raylet that this process has started."""
    from ray._private import worker

    node: Any = worker._global_node
    raylets = {str(info.process.pid) for info in node.all_processes["raylet"]}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_RAYLET_PID") in raylets:
                found.append(process)
    return found


@contextlib.contextmanager
def _reaped() -> Iterator[None]:
    """Whatever becomes of this process, no process of the Ray that it starts within outlives it for long."""
    if not sys.platform.startswith("linux"):
        yield
        return
    mark = secrets.token_hex(16)
    words = [sys.executable, "-I", "-S", reaper.__file__, mark]
    # A session of its own: what interrupts or ends this process's group must not end the reaper too.
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.environ[reaper.VARIABLE] = mark
    try:
        yield
    finally:
        os.environ.pop(reaper.VARIABLE, None)
        with contextlib.suppress(OSError):
            process.communicate(b".")


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return "://" not in address and bool(host) and port.isdigit()


def _require_token() -> None:
    """Turn on token authentication by Ray's own variables, with a fresh token unless the user has one.

    Ray reads the mode once, when it is imported. Raises NoCluster if that has happened without it.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise NoCluster("Ray was imported without token authentication; set RAY_AUTH_MODE=token first")
    os.environ["RAY_AUTH_MODE"] = "token"
    if not any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

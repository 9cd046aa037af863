"""Start, find and end the processes of a local cluster's nodes.

They are found by their records. A record is the JSON file that a node's process (`cluster.local.node`) writes once the
node runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster.local import reaper
from cluster.local.node import LONG_PATH, TOO_SLOW, NodeSpec
from cluster.workers.program import command_of
from cluster.workers.stop_signals import held_interruptions

OF_CLUSTER = "ORCHESTRATOR_LOCAL_CLUSTER"
"""The variable with the cluster's folder, in every process of a local cluster."""
UP_TIMEOUT = 120.0
"""Seconds for a node, or for the Jobs API, to start on a busy machine."""
DOWN_TIMEOUT = 10.0
"""Seconds that a node has to end before it is killed."""


class ClusterError(RuntimeError):
    """An operation on a local cluster failed. The text says why and what to do."""


def cluster_of(process: psutil.Process) -> str | None:
    """Return the folder of the local cluster that a process belongs to, None without one."""
    return process.environ().get(OF_CLUSTER)


def launch_node(node: NodeSpec, module: str = "cluster.local.node") -> subprocess.Popen[bytes]:
    """Start the process of a node, which calls `main` of `module`. Its record appears once the node runs."""
    folder = Path(node.folder)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        OF_CLUSTER: node.folder,
    }
    if (folder / "token").exists():
        environment["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
    if node.autoscaling:
        environment["RAY_enable_autoscaler_v2"] = "1"
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        environment.pop(name, None)
    # Jobs call `python`, which must be the interpreter that started this cluster and find the same code.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    )
    arguments = command_of(module, json.dumps(node.to_json()))
    with open(folder / f"node-{node.ip}.log", "ab") as log:
        return subprocess.Popen(
            arguments,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def start_nodes(nodes: Sequence[NodeSpec], module: str = "cluster.local.node") -> None:
    """Start the processes of nodes, which call `main` of `module`, and wait for their records.

    Raises ClusterError if one does not start. All of them are killed then, and after an interruption at any moment.
    """
    started: list[tuple[NodeSpec, subprocess.Popen[bytes]]] = []
    deadline = time.monotonic() + UP_TIMEOUT
    try:
        for node in nodes:
            with held_interruptions():
                started.append((node, launch_node(node, module)))
        for node, process in started:
            while not node.record.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ClusterError(f"the node at {node.ip} did not come up: {_last_words(node)}")
                time.sleep(0.05)
    except BaseException:
        for _, process in started:
            process.kill()
        raise


def _last_words(node: NodeSpec) -> str:
    """Return why a node did not start, by the last line of its log, with the fix if it is known."""
    lines = (Path(node.folder) / f"node-{node.ip}.log").read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")[:300]
    fixes = {
        LONG_PATH: "its sockets are below TMPDIR: set it to a shorter path",
        TOO_SLOW: "try again when this machine has less to do",
    }
    return "; ".join([last.rstrip("."), *(fix for part, fix in fixes.items() if part in last)])


def end_nodes(nodes: Sequence[dict[str, Any]], abruptly: bool = False) -> None:
    """End the nodes of these records with all their processes, and remove the records."""
    main_processes = [process for node in nodes if (process := process_of(node)) is not None]
    all_processes = list(main_processes)
    for main in main_processes:
        with contextlib.suppress(psutil.Error):
            all_processes += main.children(recursive=True)
        with contextlib.suppress(psutil.Error):
            main.kill() if abruptly else main.terminate()
    _wait_until_ended(main_processes)
    for process in all_processes:  # Ray's agents take seconds to notice that their node is gone
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait_until_ended(all_processes)
    for node in nodes:
        NodeSpec(node["folder"], node["ip"]).record.unlink(missing_ok=True)


def end_unrecorded(folder: str) -> bool:
    """End the processes of a cluster that have no record. Return whether there were any.

    These are nodes that were still starting, or all of the cluster's processes if its folder was removed. Raises
    ClusterError if a process does not end.
    """
    deadline = time.monotonic() + DOWN_TIMEOUT
    has_found = False
    while left := processes_by_cluster().get(folder):
        if time.monotonic() > deadline:
            raise ClusterError(f"processes of the cluster do not end: {', '.join(str(p.pid) for p in left)}")
        has_found = True
        for process in list(left):  # children may have lost the variable, because their title overwrote it
            with contextlib.suppress(psutil.Error):
                left += process.children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return has_found


def processes_by_cluster() -> dict[str, list[psutil.Process]]:
    """Return this user's live processes of local clusters, by the cluster's folder.

    Reapers, which end by themselves, and ancestors of this process are left out.
    """
    me = psutil.Process()
    above = {me, *me.parents()}
    result: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            folder = cluster_of(process)
            ours = process.uids().real == os.getuid() and process not in above and _is_alive(process)
            if folder and ours and reaper.__file__ not in process.cmdline():
                result.setdefault(folder, []).append(process)
    return result


def _wait_until_ended(processes: Sequence[psutil.Process]) -> None:
    """Wait up to DOWN_TIMEOUT seconds for processes to end. Zombies count as ended."""
    deadline = time.monotonic() + DOWN_TIMEOUT
    while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def node_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a cluster's folder, ordered by address."""
    result = []
    for path in sorted(
        (folder / "nodes").glob("*.json"), key=lambda p: [int(part) for part in p.stem.split(".")]
    ):
        with contextlib.suppress(OSError, ValueError):
            result.append(json.loads(path.read_text()))
    return result


def process_of(node: dict[str, Any]) -> psutil.Process | None:
    """Return the process of a record; None if it has ended. Its process id may belong to another process by now."""
    try:
        process = psutil.Process(node["pid"])
        same = abs(process.create_time() - node["born"]) < 1.0
        return process if same and _is_alive(process) else None
    except psutil.Error:
        return None

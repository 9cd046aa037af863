"""A cluster of real Ray nodes on this machine, for trying what a cluster does.

Each node has a loopback address of its own and is kept by one process (`cluster.local.node`). What is there stands in a
folder that only its owner can read: a file for the cluster, one for each node, the token, and all that Ray writes.
Nothing else of Ray on this machine is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.local.exclusive import alone
from cluster.local.node import NodeSpec
from cluster.local.ports import free_port

NAME = "local"
"""The cluster's name unless another is given."""
UP_TIMEOUT = 120.0
"""Seconds for a node, or for the Jobs API, to come up on a busy machine."""
DOWN_TIMEOUT = 10.0
"""Seconds for a node to end before it is killed."""
GCS_PORT, DASHBOARD_PORT = 6379, 8265
"""Ray's own ports, taken if they are free."""
LONGEST_NAME = 12
"""Letters of a name: paths of sockets within the folder are limited to 107 bytes."""


class ClusterError(RuntimeError):
    """The local cluster cannot do that now; the text says why and what to do."""


@dataclass(frozen=True)
class LocalCluster:
    """What is there: where it answers, and its nodes as their processes told."""

    name: str
    folder: str
    address: str
    dashboard: str
    network: int
    nodes: tuple[dict[str, Any], ...] = ()

    def environment(self) -> dict[str, str]:
        """Ray's own variables that lead any Ray program to this cluster."""
        token = {} if user_token() else {"RAY_AUTH_TOKEN_PATH": f"{self.folder}/token"}
        places = {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard}
        return {"RAY_AUTH_MODE": "token", **token, **places}

    def to_json(self) -> dict[str, Any]:
        """What `cluster up --json` prints; the token itself is not in it."""
        keys = ("ip", "cpus", "gpus", "resources", "labels", "pid", "kind")
        nodes = [{key: node[key] for key in keys} for node in self.nodes]
        return {"name": self.name, "environment": self.environment(), "nodes": nodes}


def user_token() -> bool:
    """Whether the user has a Ray token by Ray's own conventions."""
    named = any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def folder_of(name: str = NAME) -> Path:
    """Where the cluster of that name keeps its things. Raises ClusterError for what is no name: what is there is
    removed with the cluster."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
        raise ClusterError(f"{name!r} is no name; use up to 63 letters, digits and dashes")
    return Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / name


def find(name: str = NAME) -> LocalCluster | None:
    """The local cluster of that name, None if there is none. Nodes that have died are not in it."""
    folder = folder_of(name)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        told = json.loads((folder / "cluster.json").read_text())
    except (OSError, ValueError):
        return None
    nodes = tuple(node for node in _records(folder) if _process(node) is not None)
    if not any(not node["head_address"] for node in nodes):
        return None
    return LocalCluster(**told, nodes=nodes)


def up(name: str, nodes: Sequence[NodeSpec], autoscaling: str = "") -> LocalCluster:
    """Start a head without processors and these nodes beside it; their folders and addresses are given here.

    `autoscaling` is the text of Ray's autoscaling configuration. Raises ClusterError, with nothing left behind.
    """
    if len(name) > LONGEST_NAME:
        raise ClusterError(f"the name {name!r} is too long; use at most {LONGEST_NAME} letters")
    with claimed(name, "up"):
        if (there := find(name)) is not None:
            raise ClusterError(f"a cluster is up already at {there.address}; `cluster down` ends it")
        down(name)
        folder = folder_of(name)
        (folder / "nodes").mkdir(parents=True, mode=0o700)
        try:
            return _up(name, folder, nodes, autoscaling)
        except BaseException:
            down(name)
            raise


@contextlib.contextmanager
def claimed(name: str, purpose: str) -> Iterator[None]:
    """Be the only command with that purpose under that name. Raises ClusterError if another is at work."""
    parent = folder_of(name).parent
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise ClusterError(f"{parent} belongs to someone else; set TMPDIR to a folder of your own")
    try:
        with alone(parent / f"{name}.{purpose}.lock"):
            yield
    except BlockingIOError:
        what = f"another command is at work with the cluster {name!r}"
        raise ClusterError(f"{what}; wait until it has ended, or choose another name") from None
    finally:
        with contextlib.suppress(OSError):
            parent.rmdir()


def _up(name: str, folder: Path, nodes: Sequence[NodeSpec], autoscaling: str) -> LocalCluster:
    if not user_token():
        _write_private(folder / "token", secrets.token_hex(32))
    network = _free_network()
    head = NodeSpec(str(folder), f"127.0.{network}.1", cpus=0)
    head = dataclasses.replace(head, port=free_port(head.ip, GCS_PORT))
    head = dataclasses.replace(head, dashboard=free_port("127.0.0.1", DASHBOARD_PORT))
    address, dashboard = f"{head.ip}:{head.port}", f"http://127.0.0.1:{head.dashboard}"
    if autoscaling:
        config = folder / "autoscaling.yaml"
        text = autoscaling.replace("{folder}", str(folder)).replace("{address}", address)
        config.write_text(text.replace("{network}", str(network)))
        head = dataclasses.replace(head, autoscaling=str(config), kind="head", instance="head")
    told = LocalCluster(name, str(folder), address, dashboard, network)
    record = {key: value for key, value in dataclasses.asdict(told).items() if key != "nodes"}
    _write_private(folder / "cluster.json", json.dumps(record))
    started = [(head, launch(head))]
    _wait_for(started)
    _wait_for([(node, launch(node)) for node in placed(told, nodes)])
    _wait_for_jobs_api(dashboard)
    found = find(name)
    if found is None:
        raise ClusterError("the head ended as soon as it was up")
    return found


def add(cluster: LocalCluster, nodes: Sequence[NodeSpec]) -> LocalCluster:
    """Start nodes beside those that are there. Raises ClusterError."""
    _wait_for([(node, launch(node)) for node in placed(cluster, nodes)])
    return find(cluster.name) or cluster


def remove(cluster: LocalCluster, ip: str, abruptly: bool = False) -> None:
    """End one node; abruptly as a power failure would. Raises ClusterError if there is no such node."""
    node = next((n for n in cluster.nodes if n["ip"] == ip and n["head_address"]), None)
    if node is None:
        known = ", ".join(n["ip"] for n in cluster.nodes if n["head_address"]) or "none"
        raise ClusterError(f"there is no node {ip} to remove; choose from: {known}")
    end([node], abruptly)


def down(name: str = NAME) -> bool:
    """End all nodes and remove the folder; whether there was one."""
    folder = folder_of(name)
    if not folder.exists() or folder.stat().st_uid != os.getuid():
        return False
    records = _records(folder)
    heads = [node for node in records if not node["head_address"]]
    end(heads, abruptly=True)  # first, since its autoscaler would start nodes anew
    end(_records(folder), abruptly=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return True


def launch(node: NodeSpec) -> subprocess.Popen[bytes]:
    """Start the process of a node; its record appears once it is up."""
    folder = Path(node.folder)
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if (folder / "token").exists():
        environment["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
    if node.autoscaling:
        environment["RAY_enable_autoscaler_v2"] = "1"
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        environment.pop(name, None)
    # Jobs call `python`: it is to be the one that this cluster was started with, and to find the same code.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    )
    words = [sys.executable, "-m", "cluster.local.node", json.dumps(node.to_json())]
    with open(folder / f"node-{node.ip}.log", "ab") as log:
        return subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def end(nodes: Sequence[dict[str, Any]], abruptly: bool = False) -> None:
    """End nodes by their records, with all processes that they started, and remove the records."""
    keepers = [process for node in nodes if (process := _process(node)) is not None]
    families = list(keepers)
    for keeper in keepers:
        with contextlib.suppress(psutil.Error):
            families += keeper.children(recursive=True)
        with contextlib.suppress(psutil.Error):
            keeper.kill() if abruptly else keeper.terminate()
    _still_alive(keepers)
    for process in families:  # Ray's agents would take seconds to notice that their node is gone
        with contextlib.suppress(psutil.Error):
            process.kill()
    _still_alive(families)
    for node in nodes:
        NodeSpec(node["folder"], node["ip"]).record.unlink(missing_ok=True)


def _still_alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within DOWN_TIMEOUT; one that nobody reaps has ended."""
    deadline = time.monotonic() + DOWN_TIMEOUT
    alive = list(processes)
    while alive and time.monotonic() < deadline:
        alive = [process for process in alive if _is_alive(process)]
        time.sleep(0.05)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def placed(cluster: LocalCluster, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
    """The nodes with addresses that none has had yet, since Ray remembers the dead."""
    placed = []
    for node in nodes:
        ip = next(ip for n in range(2, 255) if _claim(cluster, ip := f"127.0.{cluster.network}.{n}"))
        placed.append(dataclasses.replace(node, folder=cluster.folder, ip=ip, head_address=cluster.address))
    return placed


def _claim(cluster: LocalCluster, ip: str) -> bool:
    """Whether this call was the first to take the address: its log is made by one process only."""
    try:
        (Path(cluster.folder) / f"node-{ip}.log").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _records(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted((folder / "nodes").glob("*.json"), key=lambda p: int(p.stem.split(".")[3])):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def _process(node: dict[str, Any]) -> psutil.Process | None:
    """The process that keeps a node, unless it is gone or its number is another's by now."""
    try:
        process = psutil.Process(node["pid"])
        same = abs(process.create_time() - node["born"]) < 1.0
        return process if same and _is_alive(process) else None
    except psutil.Error:
        return None


def _wait_for(started: Sequence[tuple[NodeSpec, subprocess.Popen[bytes]]]) -> None:
    deadline = time.monotonic() + UP_TIMEOUT
    try:
        for node, process in started:
            while not node.record.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = (
                        (Path(node.folder) / f"node-{node.ip}.log").read_text(errors="replace").splitlines()
                    )
                    last = next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")
                    raise ClusterError(f"the node at {node.ip} did not come up: {last[:300]}")
                time.sleep(0.05)
    except BaseException:
        for _, process in started:
            process.kill()
        raise


def _wait_for_jobs_api(dashboard: str) -> None:
    """Without a token it refuses: that is how it shows that it is there."""
    deadline = time.monotonic() + UP_TIMEOUT
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{dashboard}/api/jobs/", timeout=5).close()
            raise ClusterError("the Jobs API answers without a token")
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise ClusterError(f"the Jobs API at {dashboard} did not come up within {UP_TIMEOUT:.0f} s")


def _free_network() -> int:
    """Clusters side by side have addresses 127.0.<network>.x of their own."""
    used = {c.laddr.ip for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN}
    networks = [n for n in range(20, 255) if not any(ip.startswith(f"127.0.{n}.") for ip in used)]
    if not networks:
        raise ClusterError("no loopback network is free")
    return secrets.choice(networks[:50])


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)

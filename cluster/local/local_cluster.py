"""A cluster of real Ray nodes on this machine, to try out how a cluster behaves.

Each node has its own loopback address, and one process keeps it running (`cluster.local.node`). The cluster's state is
a folder that only its owner can read: a file for the cluster, one for each node, the token, and Ray's own files. Other
Ray processes on this machine are not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.local.node import NodeSpec
from cluster.local.node_processes import (
    UP_TIMEOUT,
    ClusterError,
    end_nodes,
    end_unrecorded,
    node_records,
    process_of,
    processes_by_cluster,
    start_nodes,
)
from cluster.local.ports import free_port


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Create and lock the file at `path`, and remove it at the end. The kernel releases the lock when the process ends.

    Raises BlockingIOError at once if another process holds it.
    """
    while (fd := _lock(path)) is None:
        pass  # its owner removed it in the moment in which it was opened
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _lock(path: Path) -> int | None:
    """Lock the file and return its descriptor; None if the file was removed meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


NAME = "local"
"""The cluster's name unless another is given."""
GCS_PORT = 6379
DASHBOARD_PORT = 8265
"""Ray's default ports, used if they are free."""
BLOCKS = 16
"""The number of blocks of 253 addresses for a cluster: 127.0.<network>.x, 127.1.<network>.x and so on."""
HOSTS = "hosts.json"
TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Ray's variables for a user's token."""
LONGEST_NAME = 12
"""The longest name, in characters, because the paths of sockets in the folder are limited to 107 bytes."""


@dataclass(frozen=True)
class LocalCluster:
    """A local cluster, or a cluster with a local head."""

    name: str
    folder: str
    """The folder with its state."""
    address: str
    """The address of Ray."""
    dashboard: str
    """The URL of the dashboard and the Jobs API."""
    network: int
    """The number in its addresses 127.x.<network>.y; 0 if its nodes are on other machines."""
    nodes: tuple[dict[str, Any], ...] = ()
    """The records of its nodes on this machine."""
    hosts: tuple[dict[str, Any], ...] = ()
    """The other machines with nodes, see `cluster.remote.ssh_cluster`."""

    def environment(self) -> dict[str, str]:
        """Return Ray's variables with which any Ray program connects to this cluster."""
        token = {"RAY_AUTH_TOKEN_PATH": self.token_path} if self.token_path else {}
        addresses = {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard}
        return {"RAY_AUTH_MODE": "token", **token, **addresses}

    @property
    def token_path(self) -> str:
        """Return the file of the cluster's own token; empty if it uses the token of the user's environment."""
        path = Path(self.folder) / "token"
        return str(path) if path.exists() else ""

    def to_json(self) -> dict[str, Any]:
        """Return what `cluster up --json` prints. It does not contain the token."""
        keys = ("ip", "cpus", "gpus", "resources", "labels", "pid", "kind")
        nodes = [{key: node[key] for key in keys} for node in self.nodes]
        result = {"name": self.name, "environment": self.environment(), "nodes": nodes}
        return result | ({"hosts": list(self.hosts)} if self.hosts else {})


def user_token() -> bool:
    """Return whether the user's environment has a Ray token.

    A token in ~/.ray/auth_token does not count, because Ray itself writes such a file for programs without one.
    """
    return any(os.environ.get(key) for key in TOKEN)


def folder_of(name: str = NAME) -> Path:
    """Return the folder of a cluster by its name.

    Raises ClusterError for an illegal name. This matters, because the folder is removed with the cluster.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
        raise ClusterError(f"{name!r} is not a name; use up to 63 letters, digits and dashes")
    return Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / name


def find(name: str = NAME) -> LocalCluster | None:
    """Return the local cluster with a name and its live nodes; None if it does not exist or its head has died."""
    folder = folder_of(name)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        record = json.loads((folder / "cluster.json").read_text())
    except (OSError, ValueError):
        return None
    nodes = tuple(node for node in node_records(folder) if process_of(node) is not None)
    if not any(not node["head_address"] for node in nodes):
        return None
    return LocalCluster(**record, nodes=nodes, hosts=hosts_of(name))


def hosts_of(name: str) -> tuple[dict[str, Any], ...]:
    """Return the records of a cluster's nodes on other machines."""
    try:
        return tuple(json.loads((folder_of(name) / HOSTS).read_text()))
    except (OSError, ValueError):
        return ()


def up(
    name: str,
    nodes: Sequence[NodeSpec],
    autoscaling: str = "",
    address: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> LocalCluster:
    """Start a head without CPUs, and nodes.

    Args:
        name: the name of the cluster.
        nodes: the nodes. Their folders and addresses are assigned here.
        autoscaling: the text of Ray's autoscaling configuration, empty for none.
        address: an address of this machine that other machines reach, for a cluster without nodes on this machine.
        tell: called with what is waited for.

    Raises:
        ClusterError: it did not start. Nothing is left behind.
    """
    if len(name) > LONGEST_NAME:
        raise ClusterError(f"the name {name!r} is too long; use at most {LONGEST_NAME} letters")
    with claimed(name, "up"):
        if (running := find(name)) is not None:
            raise ClusterError(f"a cluster is up already at {running.address}; `cluster down` ends it")
        down(name)
        folder = folder_of(name)
        (folder / "nodes").mkdir(parents=True, mode=0o700)
        try:
            with _alone(folder.parent):
                return _up(name, folder, nodes, autoscaling, own_address=address, tell=tell)
        except BaseException:
            down(name)
            raise


@contextlib.contextmanager
def claimed(name: str, purpose: str) -> Iterator[None]:
    """Lock a name for one purpose, so that one command at a time works on it. Raises ClusterError if it is locked."""
    parent = folder_of(name).parent
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise ClusterError(f"{parent} belongs to someone else; set TMPDIR to a folder that you own")
    try:
        with exclusive_lock(parent / f"{name}.{purpose}.lock"):
            yield
    except BlockingIOError:
        problem = f"another command is using the cluster {name!r}"
        raise ClusterError(f"{problem}; wait until it has ended, or choose another name") from None
    finally:
        with contextlib.suppress(OSError):
            parent.rmdir()


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Wait until no other cluster is starting, and keep others from starting during the block.

    Two clusters that start at once would find the same ports and the same network free. Raises ClusterError if another
    start takes too long.
    """
    deadline = time.monotonic() + 2 * UP_TIMEOUT
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(exclusive_lock(parent / "starting.lock"))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"another cluster has been starting for {2 * UP_TIMEOUT:.0f} s"
                    raise ClusterError(f"{problem}; wait until it is up, or end its command") from None
                time.sleep(0.1)
        yield


def _up(
    name: str,
    folder: Path,
    nodes: Sequence[NodeSpec],
    autoscaling: str,
    own_address: str,
    tell: Callable[[str], None],
) -> LocalCluster:
    if not user_token():
        _write_private(folder / "token", secrets.token_hex(32))
    network = 0 if own_address else _free_network()
    head = NodeSpec(str(folder), own_address or f"127.0.{network}.1", cpus=0, owns_machine=bool(own_address))
    head = dataclasses.replace(head, port=free_port(head.ip, GCS_PORT))
    head = dataclasses.replace(head, dashboard=free_port("127.0.0.1", DASHBOARD_PORT))
    address, dashboard = f"{head.ip}:{head.port}", f"http://127.0.0.1:{head.dashboard}"
    if autoscaling:
        config = folder / "autoscaling.yaml"
        text = autoscaling.replace("{folder}", str(folder)).replace("{address}", address)
        config.write_text(text.replace("{network}", str(network)))
        head = dataclasses.replace(head, autoscaling=str(config), kind="head", instance="head")
    cluster = LocalCluster(name, str(folder), address, dashboard, network)
    record = {k: value for k, value in dataclasses.asdict(cluster).items() if k not in ("nodes", "hosts")}
    _write_private(folder / "cluster.json", json.dumps(record))
    within = f"at most {UP_TIMEOUT:.0f} s, usually some seconds"
    tell(f"starting the head ({within})")
    start_nodes([head])
    if nodes:
        tell(f"starting {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} ({within})")
    start_nodes(with_addresses(cluster, nodes))
    tell(f"waiting for the Jobs API ({within})")
    _wait_for_jobs_api(dashboard)
    result = find(name)
    if result is None:
        raise ClusterError("the head ended as soon as it was up")
    return result


def add(cluster: LocalCluster, nodes: Sequence[NodeSpec]) -> LocalCluster:
    """Add nodes to a cluster. Raises ClusterError."""
    if not cluster.network:
        raise ClusterError(
            "its nodes are on other machines; end it, and start it with a longer file of hosts"
        )
    start_nodes(with_addresses(cluster, nodes))
    return find(cluster.name) or cluster


def remove(cluster: LocalCluster, ip: str, abruptly: bool = False) -> None:
    """End one node, `abruptly` as a power failure would. Raises ClusterError if the node does not exist."""
    node = next((n for n in cluster.nodes if n["ip"] == ip and n["head_address"]), None)
    if node is None:
        known = ", ".join(n["ip"] for n in cluster.nodes if n["head_address"]) or "none"
        raise ClusterError(f"there is no node {ip} to remove; choose from: {known}")
    end_nodes([node], abruptly)


def down(name: str = NAME) -> bool:
    """End all nodes and remove the folder. Return whether anything of the cluster existed.

    Raises ClusterError if a process does not end.
    """
    folder = folder_of(name)
    exists = folder.exists()
    if exists and folder.stat().st_uid != os.getuid():
        return False
    records = node_records(folder)
    heads = [node for node in records if not node["head_address"]]
    end_nodes(heads, abruptly=True)  # the head first, because its autoscaler would start new nodes
    end_nodes(node_records(folder), abruptly=True)
    ended = end_unrecorded(str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return exists or ended


def elsewhere(name: str) -> dict[str, int]:
    """Return the folders of clusters with this name under other values of TMPDIR, each with its number of processes."""
    folder = folder_of(name)
    return {
        other: len(state)
        for other, state in processes_by_cluster().items()
        if Path(other) != folder and Path(other).parts[-2:] == folder.parts[-2:]
    }


def with_addresses(cluster: LocalCluster, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
    """Give each node an address that no node had before, because Ray remembers dead nodes.

    Raises ClusterError if no address is left.
    """
    result = []
    addresses = [f"127.{block}.{cluster.network}.{n}" for block in range(BLOCKS) for n in range(2, 255)]
    free = (ip for ip in addresses if _claim(cluster, ip))  # one pass, so each address is tried once
    for node in nodes:
        ip = next(free, None)
        if ip is None:
            problem = f"the cluster has had {len(addresses)} nodes, and all addresses are used"
            raise ClusterError(f"{problem}; end it with `cluster down`, and start it again")
        result.append(dataclasses.replace(node, folder=cluster.folder, ip=ip, head_address=cluster.address))
    return result


def _claim(cluster: LocalCluster, ip: str) -> bool:
    """Claim an address by creating its log file. Return whether this call is the first to do so."""
    try:
        (Path(cluster.folder) / f"node-{ip}.log").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wait_for_jobs_api(dashboard: str) -> None:
    """Wait until the Jobs API refuses a request without a token.

    Raises ClusterError if it answers such a request, or does not start in time.
    """
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
    """Return a network 127.0.<network>.x on which nothing listens, so that several clusters can run at once."""
    used = {c.laddr.ip for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN}
    networks = [n for n in range(20, 255) if not any(ip.startswith(f"127.0.{n}.") for ip in used)]
    if not networks:
        raise ClusterError("no loopback network is free")
    return secrets.choice(networks[:50])


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)

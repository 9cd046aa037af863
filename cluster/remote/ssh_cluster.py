"""A cluster with its head on this machine and its other nodes on machines that ssh reaches.

This module also runs on the hosts, where it starts and ends the node. Each request is a separate ssh command, and no
connection stays open. The list of hosts is written before the first request, so that `down` ends all of them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.local import local_cluster
from cluster.local.local_cluster import HOSTS, LocalCluster
from cluster.local.node import NodeSpec
from cluster.local.node_processes import (
    UP_TIMEOUT,
    ClusterError,
    end_nodes,
    end_unrecorded,
    node_records,
    start_nodes,
)
from cluster.local.ports import is_own
from cluster.remote.hosts_file import Host
from cluster.workers.nvml import Nvml


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines: Ray checks Ray and Python, ranks need the others."""
    python = ".".join(platform.python_version_tuple()[:2])
    names = ("training-orchestrator", "ray", "torch")
    return {"python": python} | {name: importlib.metadata.version(name).partition("+")[0] for name in names}


def main() -> None:
    """Handle one request on a host, and print the answer. Exits with 1 after an error."""
    request = json.load(sys.stdin)
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / f"h-{request['key']}"
    try:
        answer = _up(request, folder) if sys.argv[1] == "up" else _down(folder)
    except (ClusterError, OSError) as error:
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer))
    sys.exit(1 if "error" in answer else 0)


def _up(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start a node in the background. Raises ClusterError, with nothing left behind."""
    mine = versions()
    for name, theirs in request["versions"].items():
        if mine[name] != theirs:
            raise ClusterError(f"it has {name} {mine[name]}, and the head {theirs}; install the same")
    address = request["address"] or os.environ.get("SSH_CONNECTION", "").split(" ")[2]
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise ClusterError(f"{folder.parent} belongs to someone else")
    folder.mkdir(mode=0o700)  # fails if the folder exists, which then belongs to another cluster
    try:
        (folder / "nodes").mkdir()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(request["token"])
        cpus = len(os.sched_getaffinity(0)) if request["cpus"] is None else request["cpus"]
        gpus = len(Nvml().read()) if request["gpus"] is None else request["gpus"]
        node = NodeSpec(str(folder), address, request["head"], cpus=cpus, gpus=gpus, owns_machine=True)
        start_nodes([node], "cluster.remote.node_watchdog")
        (record,) = node_records(folder)
    except BaseException:
        _down(folder)
        raise
    return {key: record[key] for key in ("ip", "cpus", "gpus", "pid")}


def _down(folder: Path) -> dict[str, Any]:
    """End the node, and remove what it wrote."""
    records = node_records(folder)
    end_nodes(records)
    end_unrecorded(str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return {"ended": len(records)}


if __name__ == "__main__":
    main()


CONNECT = 15
"""Seconds to wait for a connection to a host."""
TOGETHER = 32
"""The number of hosts that are contacted at once."""
LOOPBACK = "127.0.0.1"
"""An address at which no other machine reaches this one."""
SHOWN = 3
"""The largest number of errors that a message shows."""


@dataclass(frozen=True)
class Ssh:
    """Runs commands on hosts: `command` is ssh with its options, `python` the Python there that has this program.

    Raises ClusterError if the command is malformed.
    """

    command: str
    python: str

    def __post_init__(self) -> None:
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise ClusterError(f"--ssh {self.command}: {error}; close what is quoted") from None

    def ask(self, host: str, command: str, request: dict[str, Any]) -> dict[str, Any]:
        """Run this module on a host and return its answer. Raises ClusterError with the host's message."""
        line = f"exec {shlex.quote(self.python)} -P -m cluster.remote.ssh_cluster {command}"
        return _answer(self._run(host, line, json.dumps(request)), host)

    def own_address(self, host: str) -> str:
        """Return the address of this machine that a host sees. Raises ClusterError if that address cannot be used."""
        words = self._run(host, "echo $SSH_CONNECTION", "").stdout.split()
        if len(words) != 4:
            raise ClusterError(f"{host} does not say which address this machine has; give it as --address")
        if words[0] == LOOPBACK or not is_own(words[0]):
            problem = (
                "which other machines cannot reach"
                if words[0] == LOOPBACK
                else "which is not one of its IPv4 addresses"
            )
            raise ClusterError(
                f"{host} sees this machine as {words[0]}, {problem}; give --address, one that {host} can reach"
            )
        return words[0]

    def _run(self, host: str, line: str, standard_input: str) -> subprocess.CompletedProcess[str]:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "-o", "ServerAliveInterval=10"]
        try:
            done = subprocess.run(
                [*shlex.split(self.command), *options, host, line],
                input=standard_input, capture_output=True, text=True, timeout=CONNECT + UP_TIMEOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{host} did not answer within {CONNECT + UP_TIMEOUT:.0f} s") from None
        except OSError as error:
            raise ClusterError(f"{self.command}: {error.strerror or error}") from None
        if done.returncode == 255:  # an error of ssh itself
            raise ClusterError(f"{host}: {_last(done.stderr)}")
        return done


def up(name: str, hosts: Sequence[Host], ssh: Ssh, address: str = "") -> LocalCluster:
    """Start a head on this machine and a node on every host.

    Args:
        name: the name of the cluster.
        hosts: the hosts.
        ssh: runs commands on hosts.
        address: the address of this machine that the hosts reach, by default the one that the first host sees.

    Raises:
        ClusterError: with the hosts that failed. Nothing is left behind on hosts that answer.
    """
    if address and not is_own(address):
        raise ClusterError(
            f"--address {address} is not an IPv4 address of this machine; give the one at which the hosts reach it"
        )
    address = address or ssh.own_address(hosts[0].name)
    key = secrets.token_hex(4)
    known: list[dict[str, Any]] = [
        {"host": host.name, "key": f"{key}-{number}", "ssh": ssh.command, "python": ssh.python}
        for number, host in enumerate(hosts)
    ]

    def start(number: int) -> ClusterError | None:
        host = hosts[number]
        node = {"key": known[number]["key"], "cpus": host.cpus, "gpus": host.gpus, "address": host.address}
        try:
            known[number] |= ssh.ask(host.name, "up", shared | node)
        except ClusterError as error:
            return error
        return None

    cluster = local_cluster.up(name, [], address=address)
    try:
        token = Path(cluster.token_path).read_text() if cluster.token_path else _token_of_user()
        shared = {"head": cluster.address, "token": token, "versions": versions()}
        _write(cluster, known)
        with ThreadPoolExecutor(TOGETHER) as pool:
            failed = [str(error) for error in pool.map(start, range(len(hosts))) if error]
        if failed:
            more = f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
            raise ClusterError("; ".join(failed[:SHOWN]) + more)
        _write(cluster, known)
    except BaseException:
        down(name)
        raise
    return local_cluster.find(name) or cluster


def down(name: str) -> tuple[bool, list[str]]:
    """End a cluster with its nodes on hosts.

    Returns whether the cluster existed, and a line for each host that did not answer. The node on such a host ends by
    itself, because its head is gone.
    """
    hosts = local_cluster.hosts_of(name)

    def end(host: dict[str, Any]) -> str:
        try:
            Ssh(host["ssh"], host["python"]).ask(host["host"], "down", {"key": host["key"]})
        except ClusterError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(TOGETHER) as pool:
        silent = [line for line in pool.map(end, hosts) if line]
    return local_cluster.down(name), silent


def _write(cluster: LocalCluster, hosts: list[dict[str, Any]]) -> None:
    path = Path(cluster.folder) / HOSTS
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(hosts))
    draft.replace(path)


def _token_of_user() -> str:
    """The token of the user's environment, with which the head was started."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    return token or Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()


def _answer(done: subprocess.CompletedProcess[str], host: str) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        document = json.loads(lines[-1])
    except (ValueError, IndexError):
        problem = _last(done.stderr) or "no answer"
        raise ClusterError(f"{host}: {problem}; give --python, one there with this program") from None
    if "error" in document:
        raise ClusterError(f"{host}: {document['error']}")
    return dict(document)


def _last(text: str) -> str:
    """The last line of a program's output, without terminal escapes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(c for c in lines[-1][:300] if c.isprintable()) if lines else ""

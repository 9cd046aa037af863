"""Real Ray nodes in network namespaces of this machine, joined by a switch that can cut any of them off.

Nobody hears of a cut: no FIN, no RST, only silence, as from a dead switch. Everything hangs on processes that die
with the one that made them, so nothing is left behind, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from jobs import wait_for

from cluster.local.node import NodeSpec

PORT = 6379
TOOLS = ("ip", "bridge", "tc", "nsenter", "unshare", "setpriv")


def unable() -> str:
    """Why this machine cannot make network namespaces; empty if it can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need the command {missing[0]}"
    words = ["unshare", "--net", "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
    made = subprocess.run(words, capture_output=True, text=True)
    return f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""


class Space:
    """A network namespace, which ends with its last process."""

    def __init__(self) -> None:
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        self._keeper = subprocess.Popen(words)
        self.pid = self._keeper.pid
        ours = os.readlink("/proc/self/ns/net")
        wait_for(lambda: os.readlink(f"/proc/{self.pid}/ns/net") != ours, "a network namespace", 10)
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *words: object) -> list[str]:
        """The words of a command to be started in here; it dies with whoever starts it."""
        prefix = ["setpriv", "--pdeathsig", "KILL", "nsenter", "--target", str(self.pid), "--net"]
        return [*prefix, *map(str, words)]

    def run(self, *words: object) -> None:
        """A command in here, to its end."""
        subprocess.run(self.command(*words), check=True, capture_output=True, timeout=20)

    def processes(self) -> list[psutil.Process]:
        """All processes in here but the one that keeps it."""
        here, found = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for pid in set(psutil.pids()) - {self.pid}:
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{pid}/ns/net") == here:
                    found.append(psutil.Process(pid))
        return found

    def close(self) -> None:
        """Kill all that runs in here, if it is not closed."""
        if self._keeper.poll() is not None:
            return
        while alive := self.processes():
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self._keeper.kill()
        self._keeper.wait()


class Network:
    """A switch and the nodes on it, at 10.0.0.(1 + number); number 0 is the head."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spaces: list[Space] = []
        self._switch = Space()
        self._switch.run("ip", "link", "add", "br0", "type", "bridge")
        self._switch.run("ip", "link", "set", "br0", "up")

    @property
    def address(self) -> str:
        """Where Ray's head answers."""
        return f"{ip_of(0)}:{PORT}"

    def node_at(self, ip: str) -> int:
        """The number of the node with that address."""
        return int(ip.rsplit(".", 1)[1]) - 1

    def plug(self) -> Space:
        """Plug in one more machine, on which nothing runs yet."""
        number, space = len(self.spaces), Space()
        self.spaces.append(space)
        ends = ["eth0", "type", "veth", "peer", "name", f"port{number}", "netns", self._switch.pid]
        space.run("ip", "link", "add", *ends)
        self._switch.run("ip", "link", "set", f"port{number}", "master", "br0", "up")
        space.run("ip", "address", "add", f"{ip_of(number)}/24", "dev", "eth0")
        space.run("ip", "link", "set", "eth0", "up")
        # By the way there Ray finds a node's own address. There is no other: names are not asked for in vain.
        space.run("ip", "route", "add", "8.8.8.8", "dev", "eth0")
        return space

    def add_node(self, cpus: int) -> None:
        """Plug in one more with so many processors; returns once Ray knows it."""
        number, space = len(self.spaces), self.plug()
        joins = {"head_address": self.address} if number else {"port": PORT, "dashboard": 8265}
        spec = NodeSpec(str(self._folder), ip_of(number), cpus=cpus, **joins)
        with open(self._folder / f"node-{number}.log", "ab") as log:
            subprocess.Popen(
                space.command(sys.executable, "-m", "cluster.local.node", json.dumps(spec.to_json())),
                # The name of this machine has no address in there, by which gloo alone would find the interface.
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(spec.record.exists, f"node {number}, see {log.name}", 90)

    def cut(self, number: int) -> float:
        """From now on nothing reaches the node, and nothing leaves it. Returns when, unix seconds."""
        self._switch.run("bridge", "link", "set", "dev", f"port{number}", "state", "0")
        return time.time()

    def deafen(self, number: int) -> float:
        """From now on nothing reaches the node, though what it says is heard. Returns when, unix seconds."""
        self._switch.run("tc", "qdisc", "add", "dev", f"port{number}", "root", "pfifo", "limit", "0")
        return time.time()

    def heal(self, number: int) -> None:
        """Undo `cut`."""
        self._switch.run("bridge", "link", "set", "dev", f"port{number}", "state", "3")

    def close(self) -> None:
        """End all that runs on it."""
        for space in [*self.spaces, self._switch]:
            space.close()


def ip_of(number: int) -> str:
    """The address of a node."""
    return f"10.0.0.{1 + number}"


@contextlib.contextmanager
def network(*cpus: int) -> Iterator[Network]:
    """Nodes with so many processors each, the head first; without any, a network to plug machines into."""
    folder = Path(tempfile.mkdtemp(prefix="net-"))  # short, since names of sockets are
    (folder / "nodes").mkdir()
    found = Network(folder)
    try:
        for count in cpus:
            found.add_node(count)
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)

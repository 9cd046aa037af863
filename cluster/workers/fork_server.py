"""A process that has imported what ranks need, and forks them: an attempt starts in milliseconds, not in imports.

    python -m cluster.workers.fork_server FD

FD is a socket. The first line that comes says what to import; each later one asks to launch, to end or to tell of
ranks, and is answered by one line. Ranks die with the zygote, and it ends when the other side of the socket does.
It runs one thread and computes nothing, so that forking it is safe; CUDA is first touched in the ranks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from cluster.workers.gang import Cause

START_TIMEOUT = 180.0
"""Seconds for a fresh interpreter to import torch, on a node that has never done so."""


class ForkServer:
    """The handle of a zygote that warms up for `target`, "module:function". Raises OSError if it is gone."""

    def __init__(self, target: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there are GPUs must not touch them before a fork
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.workers.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        ours.settimeout(START_TIMEOUT)
        self._socket, self._file = ours, ours.makefile("r")
        self.target, self._killed = target, 0
        self._send({"warm": target})

    def launch(self, **rank: Any) -> int:
        """Fork a rank, which runs `cluster.workers.rank_process.run(**rank)`; returns its process id.

        Waits until the modules that ranks need are imported.
        """
        self._killed = _memory_kills()
        return int(self._ask({"do": "launch", "rank": rank})["pid"])

    def exits(self) -> dict[int, int]:
        """The exit codes by process id of the ranks that have ended, negative for a signal as in subprocess."""
        return {int(pid): code for pid, code in self._ask({"do": "exits"})["exits"].items()}

    def cause(self, pid: int) -> Cause | None:
        """How the rank of that process id ended; None while it has not."""
        code = self.exits().get(pid)
        if code is None:
            return None
        # The kernel tells no more than that it has killed some process of this machine, since the launch.
        starved = code == -signal.SIGKILL and _memory_kills() > self._killed
        return Cause("starved" if starved else "exited", code)

    def end_ranks(self) -> None:
        """Kill the ranks that run, and wait until they are gone."""
        self._ask({"do": "end"})

    def close(self) -> None:
        """End it and its ranks. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._file.close()
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._send(message)
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the process that starts ranks has ended")
        return dict(json.loads(line))


def main() -> None:
    """Serve until the socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("r")
    _warm(json.loads(lines.readline())["warm"])
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector of a rank has no business with them
    me = os.getpid()
    ranks: set[int] = set()
    ended: dict[int, int] = {}
    for line in lines:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["do"] == "launch":
            pid = os.fork()
            if not pid:
                os.close(control.detach())
                _live(message["rank"], me)
            ranks.add(pid)
            answer = {"pid": pid}
        elif message["do"] == "end":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            _reap(ranks, ended, os.WEXITED)
        else:
            _reap(ranks, ended, os.WEXITED | os.WNOHANG)
            answer = {"exits": ended}
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def _warm(target: str) -> None:
    """Import the module. A rank tells what fails here."""
    try:
        importlib.import_module(target.partition(":")[0])
    except Exception as error:
        print(f"warming up for {target} failed: {type(error).__name__}: {error}", file=sys.stderr)


def _memory_kills() -> int:
    """Processes that the kernel has killed for want of memory since the machine started, as far as it tells (Linux)."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _reap(ranks: set[int], ended: dict[int, int], options: int) -> None:
    for pid in list(ranks):
        if found := os.waitid(os.P_PID, pid, options):
            ranks.discard(pid)
            ended[pid] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _live(rank: dict[str, Any], parent: int) -> None:
    """The rest of a forked process's life."""
    from cluster.workers.rank_process import die_with_parent, run

    code = 1
    try:
        die_with_parent(parent)
        code = run(**rank)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # the rank may have closed them; threads of torch and gloo may end badly in an orderly exit
            os._exit(code)


if __name__ == "__main__":
    main()

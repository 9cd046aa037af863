"""A process that has imported what ranks need and forks them, so that an attempt starts in milliseconds.

    python -m cluster.workers.fork_server FD

FD is a socket with one JSON message a line. The first says what to import; each later one asks to launch ranks, to end
them or for their exit codes, and gets one line in answer. Ranks die with the fork server, and it ends when the other
side of the socket is closed. It has one thread and computes nothing, so that forking is safe; CUDA is first touched in
the ranks.
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
from cluster.workers.program import command_of

START_TIMEOUT = 180.0
"""Seconds for a fresh interpreter to import torch on a node that has never done so."""


class ForkServer:
    """Starts a fork server that imports the module of `target`, "module:function". Its methods raise OSError if the
    process is gone."""

    def __init__(self, target: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there are GPUs must not touch them before a fork
        }
        with theirs:
            self._process = subprocess.Popen(
                command_of("cluster.workers.fork_server", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        ours.settimeout(START_TIMEOUT)
        self._socket, self._file = ours, ours.makefile("r")
        self.target, self._oom_kills_before = target, 0
        self._send({"import": target})

    def launch(self, **rank: Any) -> int:
        """Fork a rank, which runs `cluster.workers.rank_process.run(**rank)`; returns its process id. Waits for the
        imports."""
        self._oom_kills_before = _oom_kills()
        return int(self._request({"do": "launch", "rank": rank})["pid"])

    def exits(self) -> dict[int, int]:
        """The exit codes by process id of the ranks that have ended, negative for a signal as in subprocess."""
        return {int(pid): code for pid, code in self._request({"do": "exits"})["exits"].items()}

    def cause(self, pid: int) -> Cause | None:
        """How the rank of that process id ended; None while it has not."""
        code = self.exits().get(pid)
        if code is None:
            return None
        # All that the kernel reports is that it has killed some process of this machine since the launch.
        out_of_memory = code == -signal.SIGKILL and _oom_kills() > self._oom_kills_before
        return Cause("starved" if out_of_memory else "exited", code)

    def end_ranks(self) -> None:
        """Kill the running ranks, and wait until they are gone."""
        self._request({"do": "end"})

    def close(self) -> None:
        """Kill the process and its ranks. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._file.close()
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        self._send(message)
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the process that starts ranks has ended")
        return dict(json.loads(line))


def main() -> None:
    """Serve requests until the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("r")
    _import_target(json.loads(lines.readline())["import"])
    importlib.import_module("cluster.workers.rank_process")  # once, and not in each rank
    gc.collect()
    gc.freeze()  # shared pages stay shared: the garbage collectors of ranks leave them alone
    own_pid = os.getpid()
    ranks: set[int] = set()
    exit_codes: dict[int, int] = {}
    for line in lines:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["do"] == "launch":
            pid = os.fork()
            if not pid:
                os.close(control.detach())
                _run_rank(message["rank"], own_pid)
            ranks.add(pid)
            answer = {"pid": pid}
        elif message["do"] == "end":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            _reap(ranks, exit_codes, os.WEXITED)
        else:
            _reap(ranks, exit_codes, os.WEXITED | os.WNOHANG)
            answer = {"exits": exit_codes}
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def _import_target(target: str) -> None:
    """Import the module. If that fails, each rank fails at the same import and reports it."""
    try:
        importlib.import_module(target.partition(":")[0])
    except Exception as error:
        print(f"importing {target} failed: {type(error).__name__}: {error}", file=sys.stderr)


def _oom_kills() -> int:
    """The number of processes that the kernel's out-of-memory killer has ended since boot; 0 where it is not known."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _reap(ranks: set[int], exit_codes: dict[int, int], options: int) -> None:
    for pid in list(ranks):
        if found := os.waitid(os.P_PID, pid, options):
            ranks.discard(pid)
            exit_codes[pid] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _run_rank(rank: dict[str, Any], parent: int) -> None:
    """Run a rank in the process that was just forked; does not return."""
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

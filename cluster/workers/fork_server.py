"""A process that has imported what ranks need and forks them, so that an attempt starts in milliseconds.

    python -m cluster.workers.fork_server FD

FD is a socket with one JSON message a line. The first says what to import; each later one asks to launch ranks, to end
them or for their exit codes, and gets one line in answer. Ranks die with the fork server, and it ends when the other
side of the socket is closed. It has one thread and computes nothing, so that forking is safe; CUDA is first touched in
the ranks and in the standby, a process that has its device ready and becomes the next rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from cluster.workers.gang import Cause
from cluster.workers.program import command_of, environment_of_ranks

READINESS = "make_ready"
"""The function, without arguments, with which an entry point's module makes a device ready, if it has one."""
SETTLE = 10.0
"""Seconds that a standby leaves the processor and the driver to the rank that starts beside it."""
TAKE_TIMEOUT = 1.0
"""Seconds for a standby to take over a rank, which takes it milliseconds: it may be frozen."""


class Standby:
    """Forks a process that calls `make_ready`, `delay` seconds from now. `run` is then given a function that waits for
    a rank and returns it; it runs the rank, and does not return. `inherited` are the sockets that the process closes,
    since they are its parent's."""

    def __init__(
        self,
        make_ready: Callable[[], None],
        run: Callable[[Callable[[], dict[str, Any]]], None],
        inherited: list[socket.socket],
        delay: float = 0.0,
    ) -> None:
        self.channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            for end in (self.channel, *inherited):
                os.close(end.detach())
            run(lambda: _wait_for_rank(theirs, make_ready, delay))
        theirs.close()
        self.channel.settimeout(TAKE_TIMEOUT)

    def is_ready(self) -> bool:
        """Whether it has ended, or its device is ready; `take` tells which."""
        return bool(select.select([self.channel], [], [], 0)[0])

    def take(self, rank: dict[str, Any]) -> bool:
        """Have it run the rank; False if it has ended or does not answer, and is of no use."""
        with self.channel as channel:
            try:
                if not channel.recv(1):
                    return False
                channel.sendall(json.dumps(rank).encode() + b"\n")
                return bool(channel.recv(1))
            except OSError:
                return False


def _wait_for_rank(channel: socket.socket, make_ready: Callable[[], None], delay: float) -> dict[str, Any]:
    time.sleep(delay)
    make_ready()
    channel.sendall(b"r")
    with channel, channel.makefile("r") as lines:
        rank = lines.readline()
        if not rank.endswith("\n"):
            raise SystemExit  # nobody waits any longer
        channel.sendall(b"t")
    return dict(json.loads(rank))


START_TIMEOUT = 180.0
"""Seconds for a fresh interpreter to import torch on a node that has never done so."""


class ForkServer:
    """Starts a fork server that imports the module of `target`, "module:function". Its methods raise OSError if the
    process is gone.

    With `stands_by` it keeps a process in which the module's `make_ready` has made the device ready, if it has one; the
    next rank begins in it. Another follows `settle` seconds after."""

    def __init__(
        self,
        target: str,
        stands_by: bool = False,
        settle: float = SETTLE,
        connection: socket.socket | None = None,
    ) -> None:
        """A `connection` is that to a process which serves it already, see `cluster.workers.shared_imports`."""
        self._process: subprocess.Popen[bytes] | None = None
        if connection is not None:
            self._socket = connection
        else:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    command_of("cluster.workers.fork_server", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment_of_ranks(),
                )
        self._socket.settimeout(START_TIMEOUT)
        self._file = self._socket.makefile("r")
        self.target, self._oom_kills_before = target, 0
        self._send({"import": target, "stands_by": stands_by, "settle": settle})

    def launch(self, **rank: Any) -> int:
        """Start a rank, which runs `cluster.workers.rank_process.run(**rank)`, in the standby if that is ready, else in
        a new process; returns its process id. Waits for the imports."""
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
        """End the process and its ranks. Safe to call twice."""
        if self._process is not None:
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
    serve(control, control.makefile("r"))


def serve(control: socket.socket, lines: Iterable[str]) -> None:
    """Serve the requests of these lines, which are those of the socket, until it is closed."""
    first = json.loads(next(iter(lines)))
    import_for_ranks(first["import"])
    starter = _Starter(control, first["import"] if first["stands_by"] else "")
    ranks, exit_codes = starter.ranks, dict[int, int]()
    for line in lines:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["do"] == "launch":
            answer = {"pid": starter.start(message["rank"])}
        elif message["do"] == "end":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            _reap(ranks, exit_codes, os.WEXITED)
        else:
            _reap(ranks, exit_codes, os.WEXITED | os.WNOHANG)
            answer = {"exits": exit_codes}
        control.sendall(json.dumps(answer).encode() + b"\n")
        starter.stand_by(first["settle"])
    for pid in starter.all():
        os.kill(pid, signal.SIGKILL)


class _Starter:
    """Forks ranks, and keeps a standby for the next where `target` has a function for that. `ranks` are the processes
    that were started and not yet reaped; standbys that were of no use are among them, so that they are ended too."""

    def __init__(self, control: socket.socket, target: str) -> None:
        self._control, self.ranks, self._parent = control, set[int](), os.getpid()
        module = sys.modules.get(target.partition(":")[0])
        self._make_ready: Callable[[], None] | None = getattr(module, READINESS, None)
        self._standby: Standby | None = None
        self.stand_by(0.0)

    def stand_by(self, delay: float) -> None:
        """Have a standby, which makes its device ready that many seconds from now if it is new."""
        if self._standby is None and self._make_ready is not None:
            inherited, run = [self._control], lambda rank: _run_rank(rank, self._parent)
            self._standby = Standby(self._make_ready, run, inherited, delay)

    def start(self, rank: dict[str, Any]) -> int:
        """The process id of the rank."""
        standby = self._standby
        if standby is not None and standby.is_ready():
            self._standby = None
            self.ranks.add(standby.pid)
            if standby.take(rank):
                return standby.pid
            os.kill(standby.pid, signal.SIGKILL)
        pid = os.fork()
        if not pid:
            os.close(self._control.detach())
            if self._standby is not None:
                self._standby.channel.close()
            _run_rank(lambda: rank, self._parent)
        self.ranks.add(pid)
        return pid

    def all(self) -> set[int]:
        """The process ids of the ranks and of the standby."""
        return self.ranks | ({self._standby.pid} if self._standby is not None else set())


def import_for_ranks(target: str) -> None:
    """Import the module of "module:function", and what runs a rank. If the former fails, each rank fails at the same
    import and reports it."""
    try:
        importlib.import_module(target.partition(":")[0])
    except Exception as error:
        print(f"importing {target} failed: {type(error).__name__}: {error}", file=sys.stderr)
    importlib.import_module("cluster.workers.rank_process")  # once, and not in each rank
    gc.collect()
    gc.freeze()  # shared pages stay shared: the garbage collectors of ranks leave them alone


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


def _run_rank(rank: Callable[[], dict[str, Any]], parent: int) -> None:
    """Run the rank that this returns in the process that was just forked; does not return."""
    from cluster.workers.rank_process import die_with_parent, run

    code = 1
    try:
        die_with_parent(parent)
        code = run(**rank())
    except Exception as error:  # of what makes a device ready: `run` reports what a rank raises
        print(f"a standby has failed: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # the rank may have closed them; threads of torch and gloo may end badly in an orderly exit
            os._exit(code)


if __name__ == "__main__":
    main()

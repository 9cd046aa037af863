"""The fork server: a process that has done the imports of ranks and forks them, so an attempt starts in milliseconds.

    python -m cluster.workers.fork_server FD

FD is a socket with one JSON message a line. The first message says what to import. Each later one asks to launch a
rank, to end the ranks or for their exit codes, and gets one line in answer. Ranks die with the fork server, which ends
when the other side of its socket is closed. It has one thread and computes nothing, so forking is safe. CUDA is first
initialised in the ranks and in the standby, a process that has its device ready and becomes the next rank.
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cluster.workers.gang import Cause
from cluster.workers.program import command_of, environment_of_ranks

READINESS = "make_ready"
"""The name of the function, without arguments, with which an entry point's module makes a device ready."""
SETTLE = 10.0
"""Seconds that a new standby waits, to leave the CPU and the driver to the rank that starts at the same time."""
TAKE_TIMEOUT = 1.0
"""Seconds to wait until a standby has taken over a rank, which takes milliseconds unless it is frozen."""


class Standby:
    """A forked process that makes its device ready and then waits for a rank to run."""

    def __init__(
        self,
        make_ready: Callable[[], None],
        run: Callable[[Callable[[], dict[str, Any]]], None],
        inherited: list[socket.socket],
        delay: float = 0.0,
    ) -> None:
        """Fork the process.

        Args:
            make_ready: makes the device ready.
            run: gets a function that waits for a rank and returns it. It runs that rank and does not return.
            inherited: sockets of the parent, which the process closes.
            delay: seconds to wait before `make_ready`.
        """
        self.channel, theirs = socket.socketpair()
        # This process never initialises CUDA: a context does not survive a fork, so each child makes its own.
        self.pid = os.fork()
        if not self.pid:
            # An inherited end that stays open here would hide from the other side that the parent has ended.
            for end in (self.channel, *inherited):
                os.close(end.detach())
            run(lambda: _wait_for_rank(theirs, make_ready, delay))
        theirs.close()
        self.channel.settimeout(TAKE_TIMEOUT)

    def is_ready(self) -> bool:
        """Whether its device is ready, or it has ended. `take` returns which."""
        return bool(select.select([self.channel], [], [], 0)[0])

    def take(self, rank: dict[str, Any]) -> bool:
        """Make it run the rank. Returns False if it has ended or does not answer."""
        with self.channel as channel:
            try:
                if not channel.recv(1):
                    return False
                channel.sendall(json.dumps(rank).encode() + b"\n")
                # It says that it has taken the rank. Without an answer in time the caller kills it, and no rank runs
                # twice.
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
            raise SystemExit  # the parent has closed the channel
        channel.sendall(b"t")
    return dict(json.loads(rank))


START_TIMEOUT = 180.0
"""Seconds for a fresh interpreter to import torch on a node that has never done so."""


class ForkServer:
    """The client of a fork server. Its methods raise OSError if the process is gone."""

    def __init__(
        self,
        target: str,
        stands_by: bool = False,
        settle: float = SETTLE,
        connection: socket.socket | None = None,
    ) -> None:
        """Start a fork server, unless there is a connection to one already.

        Args:
            target: the entry point, "module:function", whose module is imported.
            stands_by: whether to keep a standby, if the module has a function `make_ready`.
            settle: seconds after a launch before the next standby begins.
            connection: a connection to a process that serves already, see `cluster.workers.shared_imports`.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if connection is not None:
            self._socket = connection
        else:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    command_of("cluster.workers.fork_server", str(theirs.fileno()), target=target),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment_of_ranks(),
                )
        self._socket.settimeout(START_TIMEOUT)
        self._file = self._socket.makefile("r")
        self.target = target
        self._oom_kills_before = 0
        """The kernel's count of out-of-memory kills before the last launch."""
        self._send({"import": target, "stands_by": stands_by, "settle": settle})

    def launch(self, **rank: Any) -> int:
        """Start a rank that runs `cluster.workers.rank_process.run(**rank)`, and return its process id.

        It runs in the standby if that is ready, else in a new process. Waits for the imports.
        """
        self._oom_kills_before = _oom_kills()
        return int(self._request({"do": "launch", "rank": rank})["pid"])

    def exits(self) -> dict[int, int]:
        """Return the exit codes of ended ranks by process id; negative for a signal, as in subprocess.

        They are kept until the first launch after `end_ranks`.
        """
        return {int(pid): code for pid, code in self._request({"do": "exits"})["exits"].items()}

    def cause(self, pid: int) -> Cause | None:
        """Return how the rank with that process id ended; None while it runs."""
        code = self.exits().get(pid)
        if code is None:
            return None
        # The kernel reports only that it has killed some process of this machine since the launch.
        out_of_memory = code == -signal.SIGKILL and _oom_kills() > self._oom_kills_before
        return Cause("starved" if out_of_memory else "exited", code)

    def end_ranks(self) -> None:
        """Kill the running ranks, and wait until they are gone."""
        end_ranks([self])

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
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the process that starts ranks has ended")
        return dict(json.loads(line))


def end_ranks(servers: Sequence[ForkServer]) -> None:
    """Kill the ranks of all these fork servers, and wait until they are gone. After an OSError the servers are of no
    use any more, because an answer may be missing.
    """
    for server in servers:
        server._send({"do": "end"})
    for server in servers:
        server._answer()


def main() -> None:
    """Serve requests until the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    serve(control, control.makefile("r"))


def serve(control: socket.socket, lines: Iterable[str]) -> None:
    """Serve requests until the socket is closed.

    Args:
        control: the socket, for answers.
        lines: the requests, read from it.
    """
    first = json.loads(next(iter(lines)))
    import_for_ranks(first["import"])
    starter = _Starter(control, first["import"] if first["stands_by"] else "")
    ranks = starter.ranks
    exit_codes: dict[int, int] = {}
    have_ended = False
    for line in lines:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if message["do"] == "launch":
            if have_ended:  # those of another attempt, whose process ids may come again
                exit_codes, have_ended = {}, False
            answer = {"pid": starter.start(message["rank"])}
        elif message["do"] == "end":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            _reap(ranks, exit_codes, os.WEXITED)
            have_ended = True
        else:
            _reap(ranks, exit_codes, os.WEXITED | os.WNOHANG)
            answer = {"exits": exit_codes}
        control.sendall(json.dumps(answer).encode() + b"\n")
        starter.stand_by(first["settle"])
    for pid in starter.all():
        os.kill(pid, signal.SIGKILL)


class _Starter:
    """Forks ranks, and keeps a standby for the next one if the module of `target` has a function `make_ready`.

    Attributes:
        ranks: processes that were started and are not yet reaped, including standbys that failed to take a rank.
    """

    def __init__(self, control: socket.socket, target: str) -> None:
        self._control = control
        self._parent = os.getpid()
        self.ranks: set[int] = set()
        module = sys.modules.get(target.partition(":")[0])
        self._make_ready: Callable[[], None] | None = getattr(module, READINESS, None)
        self._standby: Standby | None = None
        self.stand_by(0.0)

    def stand_by(self, delay: float) -> None:
        """Start a standby if none exists. It prepares its device after `delay` seconds."""
        if self._standby is None and self._make_ready is not None:
            self._standby = Standby(
                self._make_ready,
                run=lambda rank: _run_rank(rank, self._parent),
                inherited=[self._control],
                delay=delay,
            )

    def start(self, rank: dict[str, Any]) -> int:
        """Start a rank and return its process id."""
        standby = self._standby
        if standby is not None and standby.is_ready():
            self._standby = None
            # Before it takes the rank: whatever becomes of it is reaped with the ranks, and leaves no zombie.
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
        """Return the process ids of the ranks and of the standby."""
        return self.ranks | ({self._standby.pid} if self._standby is not None else set())


def import_for_ranks(target: str) -> None:
    """Import the module of `target`, "module:function", and the module that runs ranks.

    If the import of the entry point fails, each rank fails at the same import and reports it.
    """
    try:
        importlib.import_module(target.partition(":")[0])
    except Exception as error:
        print(f"importing {target} failed: {type(error).__name__}: {error}", file=sys.stderr)
    importlib.import_module("cluster.workers.rank_process")  # imported once here instead of in each rank
    # Garbage that is frozen with the rest would never be freed.
    gc.collect()
    gc.freeze()  # keeps pages shared, because the garbage collectors of ranks leave frozen objects alone


def _oom_kills() -> int:
    """The number of processes that the kernel's out-of-memory killer has killed since boot; 0 if unknown."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _reap(ranks: set[int], exit_codes: dict[int, int], options: int) -> None:
    for pid in list(ranks):
        if ended := os.waitid(os.P_PID, pid, options):
            ranks.discard(pid)
            # `waitid` gives a signal's number without a sign, and says by `si_code` that it is one.
            exit_codes[pid] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _run_rank(rank: Callable[[], dict[str, Any]], parent: int) -> None:
    """Run the rank that `rank` returns in this freshly forked process. Does not return."""
    from cluster.workers.rank_process import die_with_parent, run

    code = 1
    try:
        die_with_parent(parent)
        code = run(**rank())
    except Exception as error:  # raised by `make_ready`; `run` reports errors of the rank itself
        print(f"a standby has failed: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # the rank may have closed them; threads of torch and gloo may end badly in an orderly exit
            os._exit(code)


if __name__ == "__main__":
    main()

"""A process per node that imports what ranks need once. The fork servers of runs on the node start as copies of it.

    python -m cluster.workers.shared_imports TARGET LISTENER LIFELINE

LISTENER and LIFELINE are descriptors of sockets. The process accepts connections on LISTENER, and ends when the other
side of LIFELINE is closed. A client of the same user gets a copy with the client's folder and environment. The copy
becomes a fork server (`cluster.workers.fork_server`) or calls one function. The process itself has one thread and
computes nothing, so forking is safe.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cluster.workers import fork_server
from cluster.workers.program import command_of, environment_of_ranks, working_directory_last

START_TIMEOUT = 20.0
"""Seconds for a process to start."""
CLEANUP_TIMEOUT = 5.0
"""Seconds that a cancelled call has to clean up."""


class SharedImports:
    """Starts the process, which then accepts connections by its `name`.

    `target` is the "module:function" whose module is imported. The process ends with this object's process, or when
    this object is closed. Raises OSError if a process of that name exists.
    """

    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target
        self._ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # Bound here and inherited: of two that start it at once, the second fails at `bind`, and both then connect.
            listener.bind(_address(name))
            listener.listen()  # connections wait until the imports are done
            descriptors = listener.fileno(), theirs.fileno()
            # A session of its own: Ctrl-C is for the command, which commits before it ends its ranks.
            self._process = subprocess.Popen(
                command_of("cluster.workers.shared_imports", target, *map(str, descriptors), target=target),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # errors go to the client; ranks have their own logs
                env={"OMP_NUM_THREADS": "1"} | environment_of_ranks(),
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process; its copies continue. Safe to call twice."""
        self._ours.close()
        self._process.kill()
        self._process.wait()


def is_supported() -> bool:
    """Return whether this system has sockets whose names vanish with the listening process."""
    return sys.platform.startswith("linux")


def connect(name: str, target: str) -> tuple[socket.socket, SharedImports | None]:
    """Connect to a copy of the process of that name. If no process listens, start one.

    Args:
        name: of the process.
        target: the "module:function" whose module a new process imports.

    Returns:
        The connection, and the process if it was started here.

    Raises:
        OSError: no process answers, and none can be started.
    """
    started = None
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            return _connect_and_send(name, "serve"), started
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        try:
            started = SharedImports(name, target)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another one has just been started
                raise


class CallInCopy:
    """A `RemoteTask` in a copy of the process of that name, so its imports are done.

    If the copy ends without a result, the call is repeated once in another copy, as Ray does. Raises OSError if there
    is no such process.
    """

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        self._name, self._call = name, (function, arguments)
        self._again = True
        self._answer: tuple[bool, Any] | None = None  # whether it failed, and its result or the error
        self._channel = self._begun()

    def _begun(self) -> Connection:
        channel = Connection(_connect_and_send(self._name, "call").detach())
        channel.send(self._call)
        return channel

    def done(self) -> bool:
        """See `RemoteTask.done`."""
        while self._answer is None and not self._channel.closed and self._channel.poll():
            self._receive()
        return self._answer is not None or self._channel.closed

    def result(self) -> Any:
        """See `RemoteTask.result`. Raises ChildProcessError if both copies ended without a result."""
        while self._answer is None and not self._channel.closed:
            self._receive()
        if self._answer is None:
            task = getattr(self._call[0], "__name__", str(self._call[0]))
            raise ChildProcessError(f"the process of {task} has ended")
        failed, result = self._answer
        self._channel.close()
        if failed:
            raise result
        return result

    def _receive(self) -> None:
        """Receive the copy's answer. If the copy has ended, start another."""
        try:
            self._answer = self._channel.recv()
        except (EOFError, OSError):
            self._channel.close()
            if self._again:
                self._again = False
                with contextlib.suppress(OSError):
                    self._channel = self._begun()
        except Exception as error:
            # The answer cannot be unpickled. Keep the error for `result`, because callers of `done` handle none.
            self._answer = (True, error)

    def cancel(self) -> None:
        """See `RemoteTask.cancel`."""
        if self._channel.closed:
            return
        with self._channel:
            connection = socket.socket(fileno=os.dup(self._channel.fileno()))
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(2 * CLEANUP_TIMEOUT)
                while connection.recv(2**16):  # discard answers until the copy has ended
                    pass


def main() -> None:
    """Import the target, and fork a copy for every connection until the lifeline is closed."""
    listener, lifeline = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    fork_server.import_for_ranks(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps copies; nobody reads their exit codes
    while lifeline not in select.select([listener, lifeline], [], [])[0]:
        connection, _ = listener.accept()
        if _is_ours(connection) and not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(listener.detach())
            os.close(lifeline.detach())
            try:
                _serve(connection)
            finally:
                os._exit(0)
        connection.close()


def _serve(connection: socket.socket) -> None:
    """Serve the client in a copy."""
    with connection.makefile("rb", buffering=0) as unbuffered:  # later bytes belong to other readers
        request = json.loads(unbuffered.readline())
    _adopt_client(request)
    if request["do"] == "serve":
        fork_server.serve(connection, connection.makefile("r"))
        return
    with Connection(connection.detach()) as channel:
        function, arguments = channel.recv()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_interrupt_when_unwanted, args=(channel,), daemon=True).start()
        try:
            answer = False, function(*arguments)
        except BaseException as error:
            answer = True, error
        channel.send(answer)


def _interrupt_when_unwanted(channel: Connection) -> None:
    """Interrupt the call when the client cancels it or is gone, and kill it some seconds later."""
    select.select([channel], [], [])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(CLEANUP_TIMEOUT)
    os._exit(1)


def _connect_and_send(name: str, do: str) -> socket.socket:
    """Connect to a copy of the process of that name, and send it the task and this process's rank. Raises OSError."""
    request = {"do": do, "environment": environment_of_ranks(), "folder": os.getcwd(), "path": sys.path}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(name))
        if not _is_ours(connection):
            raise PermissionError("the process with the imports of ranks belongs to another user")
        connection.sendall(json.dumps(request).encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def _adopt_client(client: dict[str, Any]) -> None:
    """Take over the client's folder and environment, as if the client had started this process."""
    os.environ.clear()
    os.environ.update(client["environment"])
    os.chdir(client["folder"])
    sys.path[:] = working_directory_last(client["path"], client["folder"])


def _address(name: str) -> str:
    # A name in Linux' abstract namespace (unix(7)), which ends with the listening process and leaves no file behind.
    return f"\0orchestrator-{name}"


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to the same user."""
    # struct ucred: pid, uid, gid, as the kernel saw them. An abstract socket has no file permissions, so this is its
    # lock.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


if __name__ == "__main__":
    main()

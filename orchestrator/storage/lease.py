"""One controller of a run at a time: a lock on a disk, a lease on an object store.

A lease is an object `.lock/<number>` that is made where none stands, so that one wins of all who take a number. Its
holder writes it anew every few seconds. One that has not changed for SILENT seconds, by the clock of whoever waits, is
of a holder that is gone: the next number may be taken. Whoever finds a later number than its own has been overtaken,
and writes nothing more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import posixpath
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any

from orchestrator.job.errors import InputError
from orchestrator.storage.object_backend import create_object
from orchestrator.storage.retry import storage_failed

LOCK = ".lock"
"""The file, or on an object store the folder of leases, in a run directory."""
PATIENCE = 20.0
"""Seconds for the processes of a killed command to be gone."""
SILENT = 15.0
"""Seconds without a sign after which the holder of a lease is taken for dead."""
BEAT = 3.0
"""Seconds between a holder's signs, and between its looks for one who has overtaken it."""

Call = Callable[..., Any]


class LeaseLost(RuntimeError):
    """Another controller has taken the run over while this one was silent: this one may write nothing more."""


@contextlib.contextmanager
def lock_file(folder: str) -> Iterator[None]:
    """Be the only one who holds the lock of a local folder, which is made if it is not there. The lock ends with the
    process, however that ends; in a folder that then holds nothing else, its file is removed.

    Raises InputError if another holds it for longer than a dying one could.
    """
    path, deadline = os.path.join(folder, LOCK), time.monotonic() + PATIENCE
    while (file := _locked(folder, path)) is None:
        if time.monotonic() > deadline:
            raise _at_work(folder)
        time.sleep(0.1)
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [LOCK]:
                    os.unlink(path)


def _locked(folder: str, path: str) -> IO[str] | None:
    """The lock's file, held; None while another holds it."""
    with contextlib.suppress(FileNotFoundError):  # a folder that went just now, with who made it
        os.makedirs(folder, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                return file
        except BlockingIOError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()
    return None


class Lease:
    """The right to write in a run directory on an object store. Use it as a context; see `lock_file`."""

    def __init__(self, fs: Any, root: str, uri: str, call: Call) -> None:
        """`root` is the run directory's path in `fs`; `call` makes a call to it, with retries."""
        self._fs, self._root, self._uri, self._call = fs, root, uri, call
        self._folder = posixpath.join(root, LOCK)
        self._me = {"owner": uuid.uuid4().hex, "host": socket.gethostname(), **_process(os.getpid())}
        self._number, self._confirmed, self._beats = 0, 0.0, 0
        self._one_at_a_time, self._ended = threading.Lock(), threading.Event()

    def __enter__(self) -> Lease:
        self._take()
        threading.Thread(target=self._stay, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._one_at_a_time, contextlib.suppress(LeaseLost):
            try:
                self._write(ended=True)
                if all(
                    path.rstrip("/").endswith(LOCK)
                    for path in self._call(self._fs.ls, self._root, detail=False)
                ):
                    self._call(self._fs.rm_file, self._path(self._number))  # of a run that never began
            except Exception as error:
                if not storage_failed(error):
                    raise  # else who comes next waits until it is taken for dead

    def require(self) -> None:
        """Raise LeaseLost if another has taken over; asks the store if that has not been done for a while."""
        if time.monotonic() - self._confirmed > 2 * BEAT:
            self._confirm()

    def _take(self) -> None:
        """Take the number after the last, once its holder is gone. Raises InputError if it is at work."""
        seen, changed = (0, b""), time.monotonic()
        deadline = changed + PATIENCE
        while True:
            last = max(self._numbers(), default=0)
            told = self._read(last)
            if (last, told) != seen:
                seen, changed = (last, told), time.monotonic()
            if _is_gone(told) or time.monotonic() - changed > SILENT:
                if self._create(last + 1):
                    return
                continue
            if time.monotonic() > deadline:
                raise _at_work(self._uri)
            time.sleep(0.5)

    def _create(self, number: int) -> bool:
        asked = time.monotonic()
        try:
            self._call(create_object, self._fs, self._path(number), self._told())
        except FileExistsError:
            if json.loads(self._read(number) or b"{}").get("owner") != self._me["owner"]:
                return False  # else it is ours, and the answer was lost
        self._number, self._confirmed = number, asked
        return max(self._numbers()) == number

    def _stay(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                with self._one_at_a_time:
                    if not self._ended.is_set():
                        self._write()
            except LeaseLost:
                return
            except Exception as error:
                if not storage_failed(error):
                    raise

    def _write(self, ended: bool = False) -> None:
        self._confirm()
        self._beats += 1
        self._call(self._fs.pipe_file, self._path(self._number), self._told(ended))

    def _confirm(self) -> None:
        asked = time.monotonic()
        if max(self._numbers(), default=0) > self._number:
            raise LeaseLost(f"another controller has taken over {self._uri}")
        self._confirmed = asked

    def _told(self, ended: bool = False) -> bytes:
        return json.dumps({**self._me, "beats": self._beats, "ended": ended}).encode()

    def _numbers(self) -> list[int]:
        try:
            found = self._call(self._fs.ls, self._folder, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in found)
        return [int(name) for name in names if name.isdigit()]

    def _read(self, number: int) -> bytes:
        """What stands under a number, nothing if it is not there."""
        try:
            return bytes(self._call(self._fs.cat_file, self._path(number)))
        except FileNotFoundError:
            return b""

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08d}"


def _is_gone(told: bytes) -> bool:
    """Whether the holder has ended: it said so, or it was a process of this machine and is none any more."""
    if not told:
        return True
    try:
        holder = json.loads(told)
        here = _process(int(holder["pid"]))
        if holder["ended"]:
            return True
        same_machine = here["boot"] and (holder["boot"], holder["space"]) == (here["boot"], here["space"])
        return bool(same_machine) and holder["born"] != here["born"]
    except (ValueError, TypeError, KeyError):
        return False


def _process(pid: int) -> dict[str, Any]:
    """What tells a process from all others: the machine's start, the space of its number, its number, and the ticks
    from the machine's start to its own, none if there is no such process."""
    # The name in parentheses may hold anything; after it come the state and, nineteen fields on, the start.
    state, *rest = _line(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    born = rest[18] if len(rest) > 18 and state not in "ZX" else ""
    space, boot = _link("/proc/self/ns/pid"), _line("/proc/sys/kernel/random/boot_id")
    return {"boot": boot, "space": space, "pid": pid, "born": born}


def _line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _at_work(where: str) -> InputError:
    return InputError(
        "another controller is at work on this run", where, "attach to it with --address, or stop it"
    )

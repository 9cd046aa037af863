"""Mutual exclusion of controllers: a run has only one at a time, by a file lock on a local disk, or a lease on an
object store.

A lease is an object `.lock/<number>`. It is created by a conditional put, so only one of several contenders for a
number succeeds. Its holder rewrites it every RENEW_EVERY seconds. A lease that has not changed for EXPIRES_AFTER
seconds, by the waiting process's clock, has expired, and the next number may be taken. A holder that finds a number
higher than its own has lost the lease and writes nothing more.
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

from orchestrator.config.errors import InputError
from orchestrator.storage.object_backend import create_object
from orchestrator.storage.process_identity import has_ended, process_identity
from orchestrator.storage.retry import storage_failed

LOCK = ".lock"
"""In a run directory: the lock file, or the folder of leases on an object store."""
LOCK_TIMEOUT = 20.0
"""Seconds to wait for a lock or lease. The processes of a killed command may take that long to end."""
EXPIRES_AFTER = 15.0
"""Seconds without a renewal after which a lease has expired."""
RENEW_EVERY = 3.0
"""Seconds between a holder's renewals. Each also checks that the lease is not lost."""

Call = Callable[..., Any]


class LeaseLost(RuntimeError):
    """This controller has lost the run and must not write any more: another took it over because the lease was not
    renewed, or the local folder was moved or removed.
    """


class FolderLock:
    """The lock of a local folder, while held."""

    def __init__(self, folder: str, file: IO[str]) -> None:
        self._folder = folder
        self._file = file

    def require(self) -> None:
        """Raise LeaseLost if the folder was moved or removed. The lock moved with it, so writing to the old path
        would create a second, incomplete run without a lock.
        """
        try:
            inode = os.stat(os.path.join(self._folder, LOCK)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            inode = None
        except OSError:
            return  # a temporary storage failure does not lose the lock
        if inode != os.fstat(self._file.fileno()).st_ino:
            raise LeaseLost(
                f"{self._folder} was moved or removed during the run; continue it with --run-dir and its new "
                "path"
            )


@contextlib.contextmanager
def lock_file(folder: str) -> Iterator[FolderLock]:
    """Hold the exclusive lock of a local folder, which is created if missing.

    The lock ends with the process, however that ends. On exit, the lock file is removed if the folder holds nothing
    else. Raises InputError if another process still holds the lock after LOCK_TIMEOUT seconds.
    """
    path = os.path.join(folder, LOCK)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while (file := _locked(folder, path)) is None:
        if time.monotonic() > deadline:
            raise _already_running(folder)
        time.sleep(0.1)
    with file:
        try:
            yield FolderLock(folder, file)
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [LOCK]:
                    os.unlink(path)


def is_locked(folder: str) -> bool:
    """Return whether a process holds the lock of a local folder now. Creates nothing."""
    with contextlib.suppress(OSError), open(os.path.join(folder, LOCK)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _locked(folder: str, path: str) -> IO[str] | None:
    """Return the open and locked lock file; None while another process holds it."""
    with contextlib.suppress(FileNotFoundError):  # another process just removed its folder
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
    """The exclusive right to write in a run directory on an object store; a context manager, as `lock_file` is."""

    def __init__(self, fs: Any, root: str, uri: str, call: Call) -> None:
        """
        Args:
            fs: the file system.
            root: the run directory's path in it.
            uri: the run directory, for messages.
            call: calls a function of `fs` with retries.
        """
        self._fs = fs
        self._root = root
        self._uri = uri
        self._call = call
        self._folder = posixpath.join(root, LOCK)
        self._owner = {
            "owner": uuid.uuid4().hex,
            "host": socket.gethostname(),
            **process_identity(os.getpid()),
        }
        self._number = 0
        self._confirmed = 0.0
        self._renewals = 0
        self._writing = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Lease:
        self._take()
        threading.Thread(target=self._keep_renewing, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._writing, contextlib.suppress(LeaseLost):
            try:
                self._write(ended=True)
                if all(
                    path.rstrip("/").endswith(LOCK)
                    for path in self._call(self._fs.ls, self._root, detail=False)
                ):
                    self._call(self._fs.rm_file, self._path(self._number))  # nothing was written here
            except Exception as error:
                if not storage_failed(error):
                    raise  # without this, the next controller waits until the lease expires

    def require(self) -> None:
        """Raise LeaseLost if another controller has taken over. Asks the store, unless it did within the last two
        renewals.
        """
        if time.monotonic() - self._confirmed > 2 * RENEW_EVERY:
            self._confirm()

    def _take(self) -> None:
        """Create the next lease once the last one has ended or expired. Raises InputError if its holder is still
        active.
        """
        observed = (0, b"")
        changed = time.monotonic()
        deadline = changed + LOCK_TIMEOUT
        while True:
            last = max(self._numbers(), default=0)
            record = self._read(last)
            if (last, record) != observed:
                observed = (last, record)
                changed = time.monotonic()
            if _has_ended(record) or time.monotonic() - changed > EXPIRES_AFTER:
                if self._create(last + 1):
                    return
                continue
            if time.monotonic() > deadline:
                raise _already_running(self._uri)
            time.sleep(0.5)

    def _create(self, number: int) -> bool:
        started = time.monotonic()
        try:
            self._call(create_object, self._fs, self._path(number), self._record())
        except FileExistsError:
            if json.loads(self._read(number) or b"{}").get("owner") != self._owner["owner"]:
                return False  # otherwise our own put created this lease, and its answer was lost
        else:
            self._require_conditional_puts(number)
        self._number = number
        self._confirmed = started
        return max(self._numbers()) == number

    def _require_conditional_puts(self, number: int) -> None:
        """Raise InputError if the store lets this lease be created twice. Some servers ignore the condition."""
        with contextlib.suppress(FileExistsError):
            self._call(create_object, self._fs, self._path(number), self._record())
            self._call(self._fs.rm_file, self._path(number))
            raise InputError(
                "the object store ignores the condition of a conditional put: two controllers could write at once",
                self._uri,
                "use a store, or a newer version of it, that honours If-None-Match (S3) or ifGenerationMatch (GCS)",
            )

    def _keep_renewing(self) -> None:
        while not self._ended.wait(RENEW_EVERY):
            try:
                with self._writing:
                    if not self._ended.is_set():
                        self._write()
            except LeaseLost:
                return
            except Exception as error:
                if not storage_failed(error):
                    raise

    def _write(self, ended: bool = False) -> None:
        self._confirm()
        self._renewals += 1
        self._call(self._fs.pipe_file, self._path(self._number), self._record(ended))

    def _confirm(self) -> None:
        started = time.monotonic()
        if max(self._numbers(), default=0) > self._number:
            raise LeaseLost(f"another controller has taken over {self._uri}")
        self._confirmed = started

    def _record(self, ended: bool = False) -> bytes:
        return json.dumps({**self._owner, "beats": self._renewals, "ended": ended}).encode()

    def _numbers(self) -> list[int]:
        try:
            paths = self._call(self._fs.ls, self._folder, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, number: int) -> bytes:
        """Return the record of the lease with that number; empty if it is missing."""
        try:
            return bytes(self._call(self._fs.cat_file, self._path(number)))
        except FileNotFoundError:
            return b""

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08d}"


def _has_ended(record: bytes) -> bool:
    """Return whether a lease's holder has ended: it recorded its end, or was a process of this machine that is gone."""
    if not record:
        return True
    try:
        holder = json.loads(record)
        is_gone = has_ended(holder)
        return bool(holder["ended"] or is_gone)
    except (ValueError, TypeError, KeyError):
        return False


def _already_running(where: str) -> InputError:
    return InputError(
        "another controller is active for this run",
        where,
        f"`orchestrator attach {where}` follows it, and `orchestrator stop {where}` ends it",
    )

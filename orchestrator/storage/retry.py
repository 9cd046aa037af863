"""Bounded retries with exponential backoff and full jitter around storage calls."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from orchestrator.config.errors import Unreachable

P = ParamSpec("P")
T = TypeVar("T")

# errors that a retry cannot fix
PERMANENT = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST,
    errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP,
}  # fmt: skip
REPAIRABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR}
"""Errors that an operator may fix while the run waits: a full disk, or a file system that is read-only or unmounted.
"""
CLIENT_PACKAGES = (
    "adlfs",
    "aiobotocore",
    "aiohttp",
    "azure",
    "botocore",
    "gcsfs",
    "google",
    "requests",
    "urllib3",
)
"""Packages whose errors are not OSErrors. They are recognised by module name, so that none needs to be imported."""
MISCONFIGURED = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoRegionError", "InvalidRegionError",
    "ParamValidationError", "UnknownEndpointError",
}  # fmt: skip
"""botocore errors that the user has to fix."""
LOST = {errno.EIO, errno.EBADMSG, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO)}
"""Errors of a medium that lost its data. A network file system raises the first during an outage, too."""
LOST_AFTER = 30.0
"""Seconds of continuous failure after which data on a medium counts as lost."""


class LostBytes(OSError):
    """A file's data cannot be read from its medium."""


ASK_AGAIN = {408, 425, 429}
"""HTTP status codes from 400 to 499 for which a retry may succeed."""
PERMANENT_TYPES = FileNotFoundError | FileExistsError | PermissionError | LostBytes
"""Permanent errors that may come without an errno."""


def transient(error: BaseException) -> bool:
    """Return whether a storage error may pass by itself: a lost connection, a timeout, a busy or failing server."""
    if 400 <= (answer := status_of(error)) < 500 and answer not in ASK_AGAIN:
        return False
    if isinstance(error, OSError):
        return error.errno not in PERMANENT and not isinstance(error, PERMANENT_TYPES)
    return isinstance(error, Unreachable) or (
        _is_client_error(error) and type(error).__name__ not in MISCONFIGURED
    )


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of a server's answer from a client's error; 0 without one."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
    return 0


def may_come_back(error: BaseException) -> bool:
    """Return whether a storage error is worth waiting for: it is transient, or an operator may fix it."""
    return transient(error) or (isinstance(error, OSError) and error.errno in REPAIRABLE)


def storage_failed(error: BaseException) -> bool:
    """Return whether an error comes from storage, transient or permanent, and not from a bug."""
    return isinstance(error, OSError | Unreachable) or _is_client_error(error)


def _is_client_error(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in CLIENT_PACKAGES


@dataclass(frozen=True)
class Retry:
    """Calls a function until it succeeds, with exponential backoff and full jitter.

    The wait after try n is drawn uniformly from 0 to min(cap, first * 2^n) seconds, so that the ranks of a gang do
    not retry at the same time.

    Attributes:
        attempts: maximum number of calls.
        first, cap: see above, seconds.
        deadline: seconds after which no further try starts.
        give_up: called before each wait and every second of it; True ends the retries.
        until_repaired: also retry errors that an operator may fix (REPAIRABLE), not only transient ones.
    """

    attempts: int = 6
    first: float = 0.2
    cap: float = 10.0
    deadline: float = 180.0
    give_up: Callable[[], bool] | None = None
    until_repaired: bool = False

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `call(*args, **kwargs)`. Raises the last error unchanged; a permanent one immediately."""
        end = time.monotonic() + self.deadline
        for attempt in range(self.attempts):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                wait = random.uniform(0, min(self.cap, self.first * 2 ** min(attempt, 30)))
                last = attempt == self.attempts - 1 or time.monotonic() + wait > end
                worth = may_come_back(error) if self.until_repaired else transient(error)
                if last or not worth or self._pause(wait):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, seconds: float) -> bool:
        """Wait this many seconds; return whether to give up."""
        end = time.monotonic() + seconds
        while not (self.give_up and self.give_up()):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 1.0) if self.give_up else left)
        return True


def patient(seconds: float, give_up: Callable[[], bool] | None = None) -> Retry:
    """Return a `Retry` that waits for an outage to end: any number of attempts within this many seconds."""
    return Retry(attempts=sys.maxsize, deadline=seconds, give_up=give_up)


def read_stored(retry: Retry, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `retry(read, ...)`. Raises LostBytes if the medium fails until the retries end, or for LOST_AFTER
    seconds.
    """
    refused: list[float] = []

    def attempt() -> T:
        try:
            return read(*args, **kwargs)
        except OSError as error:
            if error.errno not in LOST:
                raise
            refused.append(time.monotonic())
            if refused[-1] - refused[0] < LOST_AFTER:
                raise
            raise LostBytes(*error.args) from error

    try:
        return retry(attempt)
    except OSError as error:
        if error.errno not in LOST or isinstance(error, LostBytes):
            raise
        raise LostBytes(*error.args) from error

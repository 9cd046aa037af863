"""Bounded retries with exponential backoff and full jitter around storage calls."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from orchestrator.job.errors import Unreachable

P = ParamSpec("P")
T = TypeVar("T")

# no second try makes these right
PERMANENT = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST,
    errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP,
}  # fmt: skip
COMES_BACK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR}
"""Of these, what somebody mends beside the run: a full disk, a file system that is read-only or away."""
CLIENTS = ("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
"""Packages whose errors have trees of their own, told apart by module so that none need be imported."""
SET_UP = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoRegionError", "InvalidRegionError",
    "ParamValidationError", "UnknownEndpointError",
}  # fmt: skip
"""Those of botocore's that say what the user has to fix."""
FOR_GOOD = FileNotFoundError | FileExistsError | PermissionError
"""The same without a number."""


def transient(error: BaseException) -> bool:
    """Whether a storage error may pass: a lost connection, a timeout, a server that is busy or broken."""
    if isinstance(error, OSError):
        return error.errno not in PERMANENT and not isinstance(error, FOR_GOOD)
    return isinstance(error, Unreachable) or (_is_foreign(error) and type(error).__name__ not in SET_UP)


def may_come_back(error: BaseException) -> bool:
    """Whether storage that fails so is worth waiting for with nothing else to do: transient, full, or away."""
    return transient(error) or (isinstance(error, OSError) and error.errno in COMES_BACK)


def storage_failed(error: BaseException) -> bool:
    """Whether an error is of storage, for now or for good, and not of the program."""
    return isinstance(error, OSError | Unreachable) or _is_foreign(error)


def _is_foreign(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in CLIENTS


@dataclass(frozen=True)
class Retry:
    """Call a function until it works: `attempts` times at most, within `deadline` seconds.

    The wait after try n is drawn from 0 to min(cap, first * 2^n) seconds ("full jitter"), so that the ranks
    of a gang do not come back all at once. `give_up` is asked before each wait, and every second of it; with
    `mended`, what somebody mends beside the run is waited for too (see COMES_BACK).
    """

    attempts: int = 6
    first: float = 0.2
    cap: float = 10.0
    deadline: float = 180.0
    give_up: Callable[[], bool] | None = None
    mended: bool = False

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`call(*args, **kwargs)`. The last error is raised as it is; a permanent one at once."""
        end = time.monotonic() + self.deadline
        for attempt in range(self.attempts):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                wait = random.uniform(0, min(self.cap, self.first * 2 ** min(attempt, 30)))
                last = attempt == self.attempts - 1 or time.monotonic() + wait > end
                worth = may_come_back(error) if self.mended else transient(error)
                if last or not worth or self._pause(wait):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, seconds: float) -> bool:
        """Wait so long. Whether to give up instead."""
        end = time.monotonic() + seconds
        while not (self.give_up and self.give_up()):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 1.0) if self.give_up else left)
        return True


def patient(seconds: float, give_up: Callable[[], bool] | None = None) -> Retry:
    """Retries for so many seconds, however many there are: an outage is waited for."""
    return Retry(attempts=sys.maxsize, deadline=seconds, give_up=give_up)

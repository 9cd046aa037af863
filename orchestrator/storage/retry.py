"""Bounded retries with exponential backoff and full jitter around storage calls."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# no second try makes these right
PERMANENT = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST,
    errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP,
}  # fmt: skip


def transient(error: BaseException) -> bool:
    """Whether a storage error may pass: a lost connection, a timeout, a server that is busy or broken."""
    if isinstance(error, OSError):
        return error.errno not in PERMANENT and not isinstance(error, FileNotFoundError | FileExistsError)
    return _is_foreign(error)


def storage_failed(error: BaseException) -> bool:
    """Whether an error is of storage, for now or for good, and not of the program."""
    return isinstance(error, OSError) or _is_foreign(error)


def _is_foreign(error: BaseException) -> bool:
    """botocore and aiohttp have their own trees, told apart by module so that neither need be imported."""
    return type(error).__module__.split(".")[0] in ("aiobotocore", "aiohttp", "botocore", "urllib3")


@dataclass(frozen=True)
class Retry:
    """Call a function until it works: `attempts` times at most, within `deadline` seconds.

    The wait after try n is drawn from 0 to min(cap, first * 2^n) seconds ("full jitter"), so that the ranks
    of a gang do not come back all at once.
    """

    attempts: int = 6
    first: float = 0.2
    cap: float = 10.0
    deadline: float = 180.0

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`call(*args, **kwargs)`. The last error is raised as it is; a permanent one at once."""
        end = time.monotonic() + self.deadline
        for attempt in range(self.attempts):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                wait = random.uniform(0, min(self.cap, self.first * 2**attempt))
                last = attempt == self.attempts - 1 or time.monotonic() + wait > end
                if last or not transient(error):
                    raise
            time.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

from __future__ import annotations

import errno
import time

import pytest
from botocore.exceptions import EndpointConnectionError

from orchestrator.storage.retry import Retry, transient


class Flaky:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self, value: int) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return value


FAST = Retry(attempts=4, first=0.001)


def test_a_passing_fault_is_tried_again() -> None:
    flaky = Flaky(ConnectionResetError(), TimeoutError(), OSError(errno.EIO, "x"))
    assert FAST(flaky, 7) == 7
    assert flaky.calls == 4


def test_the_last_error_is_raised_after_so_many_attempts() -> None:
    flaky = Flaky(*(OSError(errno.EIO, str(number)) for number in range(9)))
    with pytest.raises(OSError, match="3"):
        FAST(flaky, 7)
    assert flaky.calls == 4


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        PermissionError(errno.EACCES, "no"),
        FileNotFoundError("gone"),
        FileExistsError("there"),
        ValueError("a bug"),
    ],
)
def test_a_permanent_fault_is_not(error: Exception) -> None:
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        FAST(flaky, 7)
    assert flaky.calls == 1


def test_the_deadline_bounds_the_waits() -> None:
    flaky = Flaky(*(ConnectionResetError() for _ in range(1000)))
    began = time.monotonic()
    with pytest.raises(ConnectionResetError):
        Retry(attempts=1000, first=0.05, cap=0.05, deadline=0.2)(flaky, 7)
    assert time.monotonic() - began < 1.0
    assert flaky.calls < 100


def test_errors_of_the_http_clients_pass() -> None:
    assert transient(EndpointConnectionError(endpoint_url="http://x"))

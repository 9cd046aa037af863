from __future__ import annotations

import dataclasses
import errno
import itertools
import time
import types

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.storage import retry
from orchestrator.storage.retry import LostBytes, Retry, patient, read_stored, storage_failed, transient


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
    assert time.monotonic() - began < 25  # without a deadline it would wait for 50 s
    assert flaky.calls < 100


def test_errors_of_the_http_clients_pass() -> None:
    assert transient(EndpointConnectionError(endpoint_url="http://x"))


def test_what_the_user_has_to_mend_does_not() -> None:
    assert not transient(NoCredentialsError())
    assert storage_failed(NoCredentialsError())
    assert not transient(PermissionError("wrong key"))
    assert transient(Unreachable("cannot be read", "s3://x"))
    assert not transient(InputError("is damaged", "s3://x"))


def answered(module: str, **told: object) -> Exception:
    """An error of a store's client, by the module that it is of."""
    error = type("Refused", (Exception,), {"__module__": module})("refused")
    vars(error).update(told)
    return error


@pytest.mark.parametrize(
    ("told", "passes"),
    [
        ({"status": 401}, False),
        ({"status": 403}, False),
        ({"status_code": 410}, False),
        ({"code": 403}, False),
        ({"code": "404"}, False),
        ({"response": types.SimpleNamespace(status_code=401)}, False),
        ({"status": 408}, True),
        ({"code": 425}, True),
        ({"status_code": 429}, True),
        ({"status": 503}, True),
        ({"code": "ServerBusy"}, True),
        ({"status": None}, True),
        ({}, True),
    ],
)
@pytest.mark.parametrize("module", ["aiohttp.client_exceptions", "gcsfs.retry", "azure.core.exceptions"])
def test_what_a_server_has_refused_does_not(module: str, told: dict[str, object], passes: bool) -> None:
    assert transient(answered(module, **told)) is passes
    assert storage_failed(answered(module, **told))


def test_an_outage_is_waited_for_however_many_tries_it_takes() -> None:
    flaky = Flaky(*(ConnectionResetError() for _ in range(12)))
    quick = dataclasses.replace(patient(60.0), first=0.001, cap=0.002)
    assert quick(flaky, 7) == 7
    assert flaky.calls == 13


def test_a_wait_ends_when_it_is_given_up() -> None:
    flaky, calls = Flaky(*(ConnectionResetError() for _ in range(100))), itertools.count()
    with pytest.raises(ConnectionResetError):
        dataclasses.replace(patient(600.0, lambda: next(calls) > 3), first=0.001)(flaky, 7)
    assert flaky.calls < 6


def test_what_a_medium_has_lost_is_not_waited_for_as_long_as_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = dataclasses.replace(patient(600.0), first=0.001, cap=0.002)
    passing = Flaky(OSError(errno.EIO, "Input/output error"), ConnectionResetError())
    assert read_stored(quick, passing, 7) == 7
    for patience in quick, Retry(attempts=3, first=0.001):
        monkeypatch.setattr(retry, "LOST_AFTER", 0.05)
        lost = Flaky(*(OSError(errno.EIO, "Input/output error") for _ in range(10_000)))
        with pytest.raises(LostBytes, match="Input/output error"):
            read_stored(patience, lost, 7)
    assert lost.calls == 3
    away = Flaky(*(OSError(errno.ETIMEDOUT, "timed out") for _ in range(3)))
    with pytest.raises(TimeoutError):
        read_stored(Retry(attempts=3, first=0.001), away, 7)

"""What is started beside the checks of a job is started only once they are likely to pass, and hears of their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from orchestrator.job.errors import InputError
from orchestrator.launch.checks import Checks


def test_what_is_wrong_at_once_is_raised_before_anything_begins() -> None:
    def check(likely: Callable[[], None]) -> None:
        raise InputError("is missing", "data.sources")

    with pytest.raises(InputError, match="is missing"):
        Checks(check).wait_until_likely()


def test_the_rest_goes_on_beside_and_is_raised_where_it_is_waited_for() -> None:
    begun = threading.Event()

    def check(likely: Callable[[], None]) -> None:
        likely()
        assert begun.wait(10)
        raise InputError("has no class", "checkpoint.export")

    checks = Checks(check)
    checks.wait_until_likely()
    begun.set()
    for _ in range(2):
        with pytest.raises(InputError, match="has no class"):
            checks.wait()


def test_what_passes_is_not_waited_for_again() -> None:
    checks = Checks(lambda likely: likely())
    checks.wait()
    checks.wait_until_likely()

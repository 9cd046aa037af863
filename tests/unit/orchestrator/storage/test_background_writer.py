"""Writing beside what goes on."""

from __future__ import annotations

import threading

import pytest

from orchestrator.storage.background_writer import BackgroundWriter


class Slow:
    """Storage that takes what it is given once it may; counts how often it is called, and how often at once."""

    def __init__(self) -> None:
        self.may, self.wanted, self.stored, self.calls, self.at_once = threading.Event(), 0, 0, 0, 0

    def __call__(self) -> None:
        self.at_once += 1
        wanted = self.wanted
        assert self.at_once == 1
        self.may.wait(60)
        self.calls, self.stored = self.calls + 1, wanted
        self.at_once -= 1


def test_nobody_waits_for_what_is_slow_and_all_is_written() -> None:
    slow = Slow()
    writer = BackgroundWriter(slow)
    for number in range(1, 4):
        slow.wanted = number
        writer.request()
    assert (slow.stored, writer.wait(0.0)) == (0, False)
    slow.may.set()
    writer.close(60)
    assert slow.stored == 3
    assert slow.calls == 2, "one that was under way, and one for all that came since"


def test_what_is_quick_is_done_when_it_was_asked_for() -> None:
    slow = Slow()
    slow.may.set()
    writer = BackgroundWriter(slow)
    slow.wanted = 1
    writer.request()
    assert writer.wait(60)
    assert slow.stored == 1


def test_an_error_comes_back_to_who_asks() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    writer = BackgroundWriter(fail)

    def asked() -> None:
        writer.request()
        writer.wait(60)

    with pytest.raises(ZeroDivisionError):
        asked()
    writer.close(60)

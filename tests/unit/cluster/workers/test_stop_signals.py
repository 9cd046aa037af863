"""What asks a command to end, at moments at which an exception would be lost, or would lose something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.workers.stop_signals import ENDS, held_interruptions, kept_interruptions

ENDING = pytest.mark.parametrize("number", ENDS)


@pytest.fixture(autouse=True)
def _as_the_command_has_it() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in ENDS]


def sends(*numbers: int) -> list[str]:
    """What is done within a moment that is held, to which these signals come."""
    done = []
    with held_interruptions():
        for number in numbers:
            os.kill(os.getpid(), number)
            done.append("the rest")
    return done


@ENDING
def test_what_is_held_is_raised_at_the_end(number: int) -> None:
    done, before = list[str](), handlers()

    def start() -> None:
        with held_interruptions():
            os.kill(os.getpid(), number)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["the rest"]
    assert handlers() == before


def test_a_second_interruption_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        sends(signal.SIGINT, signal.SIGTERM)
    assert handlers() == [signal.default_int_handler] * 3


def test_what_is_held_within_what_is_held_is_raised_once_at_the_end() -> None:
    done = []

    def start() -> None:
        with held_interruptions():
            done.extend(sends(signal.SIGINT))
            done.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["the rest", "what follows"]


@ENDING
@pytest.mark.parametrize("held", [kept_interruptions, held_interruptions])
def test_what_is_ignored_stays_so(number: int, held: Callable[[], Any]) -> None:
    """As a shell has it for SIGINT in the background of a script, and nohup for SIGHUP."""
    signal.signal(number, signal.SIG_IGN)
    with held():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_IGN


def test_what_is_started_meanwhile_hears_what_this_process_ignores() -> None:
    """Ray cancels a call by an interruption of its process, which does nothing where SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    with kept_interruptions():
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert said == "True\n"


def test_who_handles_an_interruption_otherwise_goes_on_to_do_so() -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    assert sends(signal.SIGTERM, signal.SIGTERM) == ["the rest", "the rest"]
    assert heard == [signal.SIGTERM] * 2


class Swallows:
    """What is raised in its end is ignored by Python, as in a hook at a fork."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_was_swallowed_is_raised_at_the_end() -> None:
    before, done = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)), []

    def start() -> None:
        with kept_interruptions():
            Swallows()
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["the rest"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with kept_interruptions():
        done.append("as ever")

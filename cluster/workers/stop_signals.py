"""Handle SIGINT, SIGTERM and SIGHUP where an exception would be lost, or would leave something behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a command to end."""


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt for SIGTERM, and for SIGHUP unless nohup ignores it. `launch.watched_run` turns that into
    a stop of the run: a checkpoint, then the end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


@contextlib.contextmanager
def kept_interruptions() -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals in ENDS, at the end of the block at the latest.

    Python's fork hooks swallow exceptions, and the start of Ray forks often, so an interruption is repeated at the end.
    Signals that this process ignores stay ignored, as a shell ignores SIGINT for background jobs of a script. Child
    processes do not inherit that, because Ray cancels calls by interrupting the process that runs them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def ignore(number: int, _: Any) -> None:
        """Ignore a signal here only: child processes inherit SIG_IGN, but not a function."""

    before = {number: signal.getsignal(number) for number in ENDS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # set by nohup, and Ray should inherit it
        before.pop(signal.SIGHUP)
    for number, handler in before.items():
        signal.signal(number, ignore if handler == signal.SIG_IGN else interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held_interruptions() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of the block, so that whatever the block starts can be stopped afterwards.

    A second interruption raises at once. Keep the block short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def hold(number: int, _: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    interruptible = [number for number in ENDS if signal.getsignal(number) is signal.default_int_handler]
    for number in interruptible:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number in interruptible:
            signal.signal(number, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt

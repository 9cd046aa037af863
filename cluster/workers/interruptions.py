"""SIGINT, SIGTERM and SIGHUP at moments at which an exception would be lost, or would lose something."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end."""


@contextlib.contextmanager
def kept_interruptions() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, at the end of this at the latest: hooks that Python runs at a fork,
    of which the start of Ray has many, swallow what is raised in them. What this process ignores it goes on to ignore,
    as a shell has it for what a script runs in the background; what is started here does not inherit that, since
    Ray cancels calls by an interruption of the process that runs them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def ignore(number: int, _: Any) -> None:
        """SIGINT: a function is not inherited, and SIG_IGN is."""

    before = {number: signal.getsignal(number) for number in ENDS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # as nohup has it, and Ray is to inherit that
        before.pop(signal.SIGHUP)
    for number, handler in before.items():
        signal.signal(number, ignore if handler == signal.SIG_IGN else interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if seen:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held_interruptions() -> Iterator[None]:
    """What would raise KeyboardInterrupt now raises it at the end of this, when what is started here is known to
    whoever has to stop it; a second time, at once. Keep it short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def hold(number: int, _: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    held = [number for number in ENDS if signal.getsignal(number) is signal.default_int_handler]
    for number in held:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt

"""Silencing the log messages of libraries for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def quiet(loggers: Sequence[logging.Logger | logging.Handler], level: int) -> Iterator[None]:
    """Suppress messages below `level` of these loggers or handlers within the context."""
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)

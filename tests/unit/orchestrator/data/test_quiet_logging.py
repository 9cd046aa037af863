"""Loggers that were silenced log again afterwards."""

from __future__ import annotations

import logging

import pytest

from orchestrator.data.quiet_logging import quiet


def test_levels_come_back_even_after_an_error() -> None:
    logger, handler = logging.getLogger("test-hush"), logging.StreamHandler()
    logger.setLevel(logging.INFO)
    levels: list[int] = []

    def fail() -> None:
        with quiet([logger, handler], logging.CRITICAL):
            levels.extend((logger.level, handler.level))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert levels == [logging.CRITICAL, logging.CRITICAL]
    assert (logger.level, handler.level) == (logging.INFO, logging.NOTSET)

"""What is hushed speaks again afterwards."""

from __future__ import annotations

import logging

import pytest

from orchestrator.hush import hushed


def test_levels_come_back_even_after_an_error() -> None:
    logger, handler = logging.getLogger("test-hush"), logging.StreamHandler()
    logger.setLevel(logging.INFO)
    with pytest.raises(KeyError), hushed([logger, handler], logging.CRITICAL):
        assert (logger.level, handler.level) == (logging.CRITICAL, logging.CRITICAL)
        raise KeyError
    assert (logger.level, handler.level) == (logging.INFO, logging.NOTSET)

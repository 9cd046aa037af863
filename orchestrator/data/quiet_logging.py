"""Libraries that tell in the terminal what is told better elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def hushed(tellers: Sequence[logging.Logger | logging.Handler], level: int) -> Iterator[None]:
    """Keep what is below `level` from these loggers or handlers to themselves for a while."""
    before = [teller.level for teller in tellers]
    for teller in tellers:
        teller.setLevel(level)
    try:
        yield
    finally:
        for teller, old in zip(tellers, before, strict=True):
            teller.setLevel(old)

"""At which steps a run commits."""

from __future__ import annotations

from collections.abc import Sequence


def regular_before(step: int, every: int, count: int) -> Sequence[int]:
    """The steps of the `count` commits before `step` that are regular, every so many steps, newest first: interruptions
    add others."""
    return range((step - 1) // every * every, 0, -every)[:count]

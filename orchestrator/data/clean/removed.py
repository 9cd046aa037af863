"""What a step says of a document that it removes."""

from __future__ import annotations

from typing import NamedTuple


class Removed(NamedTuple):
    """A document is removed, for a reason in a few words."""

    reason: str

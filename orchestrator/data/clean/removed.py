"""The result of a step that removes a document."""

from __future__ import annotations

from typing import NamedTuple


class Removed(NamedTuple):
    """A document is removed, with the reason in a few words."""

    reason: str

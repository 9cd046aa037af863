"""The answer to a request to drain a node."""

from __future__ import annotations

from typing import NamedTuple


class DrainAnswer(NamedTuple):
    """What became of the request to drain a node."""

    is_final: bool
    """Whether another request would have the same answer."""
    refusal: str = ""
    """Why the node is not drained, as a clause for people; empty if it is drained or gone."""

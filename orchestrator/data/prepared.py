"""Where prepared data is."""

from __future__ import annotations

from dataclasses import dataclass, field

EXCERPT = "excerpt"
"""The excerpt of the data in a run directory."""


@dataclass(frozen=True)
class PreparedData:
    """The location of a job's prepared data: that of `data.sources` (empty before it exists), and by name that of the
    sets with separate text.

    `format` is that of data which does not exist yet; 0 for the newest.
    """

    uri: str = ""
    sets: dict[str, str] = field(default_factory=dict)
    format: int = 0

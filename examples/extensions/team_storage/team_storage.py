"""`team://PATH` for every library that reads through fsspec: a path below the folder $TEAM_STORAGE."""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class TeamFileSystem(LocalFileSystem):
    """The folder that the environment variable TEAM_STORAGE names, under a protocol of its own."""

    protocol = "team"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str) and path.startswith("team://"):
            path = os.path.join(os.environ["TEAM_STORAGE"], path.removeprefix("team://"))
        return super()._strip_protocol(path)

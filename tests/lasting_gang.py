"""A gang of local processes that lasts from test to test: importing what ranks need takes longer than most tests."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Set
from typing import Any

from cluster.workers.gang import Bundle
from cluster.workers.process_gang import ProcessGang
from cluster.workers.rank_output import OutputTarget


class LastingGang(ProcessGang):
    """Forks the ranks of every target from one process, which has imported what `any_rank` does, in the environment
    that is there when they start. `close` ends the ranks only."""

    def start(
        self,
        world_size: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """See `Gang.start`."""
        given = {"target": target, "config": config, "environment": dict(os.environ)}
        super().start(world_size, bundle, "any_rank:main", given, ranks_per_group, avoid, output)

    def close(self) -> None:
        """See `Gang.close`; the next start is as quick as this gang's last."""
        self.stop()

    def end(self) -> None:
        """Close it for good."""
        super().close()


@functools.cache
def lasting_gang(name: str = "ranks") -> LastingGang:
    """The one of that name of this test process."""
    found = LastingGang()
    atexit.register(found.end)
    return found

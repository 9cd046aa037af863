"""Make the rows of the sources that a function of the user's own makes, before a job is checked."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.data.config import DataSpec
from orchestrator.data.sources.check import check_own_rows_have_place
from orchestrator.data.sources.own_rows import is_made, make_rows
from orchestrator.launch.submission import on_cluster


def make_own_sources(data: DataSpec, address: str | None, tell: Callable[[str], None]) -> None:
    """Make the rows that are not there yet, with Ray.

    Args:
        data: the data of a job.
        address: the cluster, None to start Ray on this machine.
        tell: called with a line about the progress.

    Raises InputError, see `make_rows`, or if no cluster answers.
    """
    own = [
        (f"data.sources.{number}.own", source)
        for number, source in enumerate(data.sources)
        if source.own is not None
    ]
    check_own_rows_have_place(data)
    missing = [(where, source) for where, source in own if not is_made(source)]
    if not missing:
        return
    with on_cluster(address):
        for where, source in missing:
            make_rows(source, where, tell)

"""The readings of a run's nodes, as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.storage.row_line import NODES, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir

NODES_PATIENCE = 10.0
"""Seconds that the end of a run waits until the readings of nodes are stored."""


NODES_HOLD = 10.0
"""Seconds that rows are buffered on an object store, where every write makes an object."""


class NodeRows:
    """Numbers the readings of nodes and writes them to nodes.jsonl.

    A row's number is the time of its reading in milliseconds, or the previous number plus one if that is larger. So
    numbers also grow from one controller to the next, without reading the file.

    Attributes:
        rows: the writer of nodes.jsonl.
        latest: the last values of each node that the gang runs on, by node.
    """

    def __init__(self, run: RunDir, stored: Callable[[Sequence[Row]], None]) -> None:
        """`stored` is called with rows once they are stored."""
        hold = 0.0 if run.local else NODES_HOLD
        self.rows = RowWriter(run, NODES, hold=hold, stored=stored)
        self.latest: dict[str, dict[str, float]] = {}
        self._number = 0
        self._attempt = 0

    def add(self, node_metrics: Sequence[dict[str, Any]], attempt: int) -> None:
        """Add the readings that the gang of `attempt` reported."""
        if not node_metrics:
            return
        previous = self.latest if attempt == self._attempt else {}
        self._attempt = attempt
        # A new dictionary each time, because `status` reads it from another thread.
        self.latest = previous | {metrics["node"]: metrics["values"] for metrics in node_metrics}
        rows: list[Row] = []
        for metrics in node_metrics:
            self._number = max(self._number + 1, int(1000 * metrics["time"]))
            rows.append({"number": self._number, "attempt": attempt, **metrics})
        self.rows.add(rows)

    def wait_until_stored(self) -> None:
        """Wait up to NODES_PATIENCE until all rows are stored. Storage errors are ignored: no run fails over these."""
        with contextlib.suppress(OSError):
            self.rows.drain(NODES_PATIENCE)

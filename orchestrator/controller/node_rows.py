"""The rows of nodes.jsonl: what was read of the nodes under the ranks, see `cluster.workers.node_metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.storage.row_line import NODES, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir

PATIENCE = 10.0
HOLD = 10.0
"""Seconds that rows are buffered on an object store, where every write makes an object."""


class NodeRows:
    """Numbers readings and writes them; `latest` has the last values of each node that the gang runs on.

    A number is that of the millisecond, or one more than that of the row before: so it also grows from one controller
    to the next, which need not read what there is.
    """

    def __init__(self, run: RunDir, stored: Callable[[Sequence[Row]], None]) -> None:
        self.rows = RowWriter(run, NODES, 0.0 if run.local else HOLD, stored)
        self.latest: dict[str, dict[str, float]] = {}
        self._number, self._attempt = 0, 0

    def add(self, readings: Sequence[dict[str, Any]], attempt: int) -> None:
        """Add what a gang of that attempt reported."""
        if not readings:
            return
        kept = self.latest if attempt == self._attempt else {}
        self._attempt = attempt
        # A new one each time: what asks for the status reads it from another thread.
        self.latest = kept | {reading["node"]: reading["values"] for reading in readings}
        rows: list[Row] = []
        for reading in readings:
            self._number = max(self._number + 1, int(1000 * reading["time"]))
            rows.append({"number": self._number, "attempt": attempt, **reading})
        self.rows.add(rows)

    def settle(self) -> None:
        """Have all stored, if storage takes it within some seconds: no run fails for want of these."""
        with contextlib.suppress(OSError):
            self.rows.drain(PATIENCE)

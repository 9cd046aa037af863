"""The readings of a run's nodes, as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from cluster.workers.node_metrics import CPU_JOULES, GPU_JOULES, LONGEST_INTERVAL, SECONDS
from orchestrator.storage.row_line import NODES, Row
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir

MOST_NODES = 64
"""Nodes whose readings are all stored. More nodes share the rows that these would have."""
NODES_PATIENCE = 10.0
"""Seconds that the end of a run waits until the readings of nodes are stored."""


NODES_HOLD = 10.0
"""Seconds that rows are buffered on an object store, where every write makes an object."""


class NodeRows:
    """Numbers the readings of nodes and writes them to nodes.jsonl.

    A row's number is the time of its reading in milliseconds, or the previous number plus one if that is larger. So
    numbers also grow from one controller to the next, without reading the file.

    Of more than MOST_NODES nodes, several readings of a node become one row: the last one, with the seconds and joules
    of all.

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
        self._held: dict[str, dict[str, Any]] = {}
        """What no row has yet, by node."""

    def add(self, node_metrics: Sequence[dict[str, Any]], attempt: int) -> None:
        """Add the readings that the gang of `attempt` reported."""
        if not node_metrics:
            return
        previous = self.latest
        if attempt != self._attempt:
            self._store(list(self._held.values()))
            previous = {}
        self._attempt = attempt
        # A new dictionary each time, because `status` reads it from another thread.
        self.latest = previous | {metrics["node"]: metrics["values"] for metrics in node_metrics}
        nodes = len(self.latest)
        interval = LONGEST_INTERVAL * nodes / MOST_NODES if nodes > MOST_NODES else 0.0
        due = []
        for metrics in node_metrics:
            whole = _sum_of(self._held.pop(metrics["node"], None), metrics)
            if whole["values"].get(SECONDS, 0.0) < interval:
                self._held[metrics["node"]] = whole
            else:
                due.append(whole)
        self._store(due)

    def _store(self, node_metrics: Sequence[dict[str, Any]]) -> None:
        """Add a row for each of these readings, which are held no longer."""
        rows: list[Row] = []
        for metrics in node_metrics:
            self._held.pop(metrics["node"], None)
            self._number = max(self._number + 1, int(1000 * metrics["time"]))
            rows.append({"number": self._number, "attempt": self._attempt, **metrics})
        self.rows.add(rows)

    def wait_until_stored(self) -> None:
        """Wait up to NODES_PATIENCE until all rows are stored. Storage errors are ignored: no run fails over these."""
        self._store(list(self._held.values()))
        with contextlib.suppress(OSError):
            self.rows.drain(NODES_PATIENCE)


def _sum_of(before: dict[str, Any] | None, reading: dict[str, Any]) -> dict[str, Any]:
    """Return a reading with the seconds and joules of those before it too. A sum that lacks a part is left out."""
    if before is None:
        return reading
    earlier, values = before["values"], dict(reading["values"])
    for key in (SECONDS, CPU_JOULES, GPU_JOULES):
        if key in values and key in earlier:
            values[key] = round(values[key] + earlier[key], 3)
        else:
            values.pop(key, None)
    return {**reading, "values": values}

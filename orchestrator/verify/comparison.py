"""Compare a run with faults with an undisturbed run: receipts, losses, recovery time and leftovers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from cluster.local.node_processes import cluster_of
from orchestrator.storage.run_directory import Row

TOLERANCE = 1e-4
"""Largest relative difference of losses if a fault changed the layout: float32 sums in another order, amplified by the
optimiser over many steps. Under the same layout the losses must be equal to the last bit."""
DEADLY = ("kill@", "stop@", "raise@")
"""Prefixes of the rank faults that end an attempt."""
LEAVING = 10.0
"""Seconds for processes to disappear after a run."""


@dataclass(frozen=True)
class RunEnd:
    """The state of a run that has ended, for the comparison.

    `outcome` is how it ended, `seconds` its duration, `fault_times` when external faults were applied, in unix seconds,
    `left` the processes and placement groups that still exist.
    """

    outcome: str
    seconds: float
    fault_times: tuple[float, ...]
    rows: list[Row]
    events: list[Row]
    left: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a run with faults with the undisturbed one.

    `receipt` and `losses` are "same" or the difference; `back_after` is the seconds from a fault to the next new step,
    None if training never paused; `left` lists what still ran or was still locked afterwards; `missed` counts faults
    that did not
    happen, in which case the comparison proves nothing.
    """

    fault: str
    ended: str
    receipt: str
    losses: str
    attempts: int
    lost_steps: int
    back_after: float | None
    left: tuple[str, ...]
    seconds: float
    first_fault: str = ""
    missed: int = 0

    @property
    def is_same(self) -> bool:
        """Return whether both runs are the same."""
        same = self.receipt in ("same", "as on record") and not self.losses.startswith("differ")
        return self.ended == "done" and same and not self.left and not self.missed


def compare(fault: str, run: RunEnd, reference: list[Row], injected: Sequence[str]) -> RunComparison:
    """Compare a run that got the faults `injected` with the rows of the undisturbed run."""
    rows, events = run.rows, run.events
    faults = [event for event in events if event.get("first_fault")]
    return RunComparison(
        fault=fault,
        ended=run.outcome,
        receipt=_receipts(rows, reference, events),
        losses=_losses(rows, reference),
        attempts=max((event["attempt"] for event in events), default=0),
        lost_steps=sum(event.get("lost_steps") or 0 for event in faults),
        back_after=_back_after(run, events, rows),
        left=run.left,
        seconds=run.seconds,
        first_fault=faults[0]["first_fault"] if faults else "",
        missed=max(sum(word.startswith(DEADLY) for word in injected) - len(faults), 0),
    )


def _receipts(rows: list[Row], reference: list[Row], events: list[Row]) -> str:
    receipts = [row["samples"] for row in rows]
    if receipts == [row["samples"] for row in reference]:
        return "same"
    if len(receipts) == len(reference) and any(event.get("skipped") for event in events):
        return "as on record"  # events and manifests record samples skipped after an instability
    differs = next(
        (
            n
            for n, (a, b) in enumerate(zip(rows, reference, strict=False), start=1)
            if a["samples"] != b["samples"]
        ),
        0,
    )
    return f"differs from step {differs}" if differs else f"{len(receipts)} of {len(reference)} steps"


def _losses(rows: list[Row], reference: list[Row]) -> str:
    pairs = [
        (a["loss"], b["loss"])
        for a, b in zip(rows, reference, strict=False)
        if a["samples"] == b["samples"] and None not in (a.get("loss"), b.get("loss"))
    ]
    if all(a == b for a, b in pairs):
        return "same"
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    layouts = {row["layout"] for row in [*rows, *reference]}
    if len(layouts) > 1 and apart <= TOLERANCE:
        return f"within {apart:.0e}, by another layout"
    return f"differ by {apart:.0e} under {' and '.join(sorted(layouts))}"


def _back_after(run: RunEnd, events: list[Row], rows: list[Row]) -> float | None:
    """Return the seconds from a fault to the next new step, the longest of all faults; None without faults."""
    result = []
    for number, event in enumerate(events):
        if event.get("first_fault"):
            back = next((e["time"] for e in events[number:] if e["phase"] == "train"), None)
            result.append(back - event["time"] + event.get("still_seconds", 0.0) if back else 0.0)
    for fault_time in run.fault_times:
        if next_row := next((row["time"] for row in rows if row["time"] > fault_time), None):
            result.append(next_row - fault_time)
    return max(result, default=None)


def leftovers_of(folder: str) -> tuple[str, ...]:
    """Return the cluster's ranks, checkpoint writers and placement groups that remain after LEAVING seconds.

    `folder` is the folder of the cluster, to which this process must be connected.
    """
    deadline = time.monotonic() + LEAVING
    while (result := (*_processes(folder), *_placement_groups())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result


def _processes(folder: str) -> list[str]:
    """Return the processes of ranks and of checkpoint writers that belong to the cluster."""
    result = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            ours = "cluster.workers.fork_server" in command or "orchestrator.checkpoint" in command
            if ours and cluster_of(process) == folder:
                result.append(f"process {process.pid}: {command[-80:]}")
        except psutil.Error:
            continue
    return result


def _placement_groups() -> list[str]:
    from ray.util.placement_group import placement_group_table

    return [
        f"placement group {key}"
        for key, group in placement_group_table().items()
        if group["state"] != "REMOVED"
    ]


def to_json(comparisons: Sequence[RunComparison]) -> list[dict[str, Any]]:
    """Return each comparison as plain data, with `held`: whether it is the same run."""
    return [{**dataclasses.asdict(comparison), "held": comparison.is_same} for comparison in comparisons]

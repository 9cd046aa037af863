"""Whether a disturbed run is the same run: its receipts, its losses, how soon it was back and what it left behind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.storage.run_directory import Row

TOLERANCE = 1e-4
"""Relative difference of losses where a fault changed the layout: sums of float32 in another order, carried on by the
optimiser over many steps. Under the same layout, the bits must be the same."""
DEADLY = ("kill@", "stop@", "raise@")
"""Faults of a rank that end an attempt."""
LEAVING = 10.0
"""Seconds that processes have to be gone after a run."""


@dataclass(frozen=True)
class RunEnd:
    """A run that ended: how, after how many seconds, when it was struck from outside (unix seconds), its rows and
    events, and what was left of it."""

    how: str
    seconds: float
    struck: tuple[float, ...]
    rows: list[Row]
    events: list[Row]
    left: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """How a disturbed run compares.

    `receipt` and `losses` say "same", or what differs; `back_after` is seconds from the fault to the next new step,
    None if nothing stood still; `left` is what still ran or was held afterwards; `missed` are faults that never came,
    so that nothing is proved.
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
    def held(self) -> bool:
        """Whether it is the same run."""
        same = self.receipt in ("same", "as on record") and not self.losses.startswith("differ")
        return self.ended == "done" and same and not self.left and not self.missed


def compare(fault: str, trial: RunEnd, wanted: list[Row], asked: Sequence[str]) -> RunComparison:
    """A run that `asked` for these faults against the rows of the undisturbed one."""
    rows, events = trial.rows, trial.events
    faults = [event for event in events if event.get("first_fault")]
    return RunComparison(
        fault=fault,
        ended=trial.how,
        receipt=_receipts(rows, wanted, events),
        losses=_losses(rows, wanted),
        attempts=max((event["attempt"] for event in events), default=0),
        lost_steps=sum(event.get("lost_steps") or 0 for event in faults),
        back_after=_back_after(trial, events, rows),
        left=trial.left,
        seconds=trial.seconds,
        first_fault=faults[0]["first_fault"] if faults else "",
        missed=max(sum(word.startswith(DEADLY) for word in asked) - len(faults), 0),
    )


def _receipts(rows: list[Row], wanted: list[Row], events: list[Row]) -> str:
    told = [row["samples"] for row in rows]
    if told == [row["samples"] for row in wanted]:
        return "same"
    if len(told) == len(wanted) and any(event.get("skipped") for event in events):
        return "as on record"  # samples were left out on purpose, and events and manifests say which
    differs = next(
        (
            n
            for n, (a, b) in enumerate(zip(rows, wanted, strict=False), start=1)
            if a["samples"] != b["samples"]
        ),
        0,
    )
    return f"differs from step {differs}" if differs else f"{len(told)} of {len(wanted)} steps"


def _losses(rows: list[Row], wanted: list[Row]) -> str:
    pairs = [
        (a["loss"], b["loss"]) for a, b in zip(rows, wanted, strict=False) if a["samples"] == b["samples"]
    ]
    if all(a == b for a, b in pairs):
        return "same"
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    layouts = {row["layout"] for row in [*rows, *wanted]}
    if len(layouts) > 1 and apart <= TOLERANCE:
        return f"within {apart:.0e}, by another layout"
    return f"differ by {apart:.0e} under {' and '.join(sorted(layouts))}"


def _back_after(trial: RunEnd, events: list[Row], rows: list[Row]) -> float | None:
    """The longest time from a fault to the next new step."""
    found = []
    for number, event in enumerate(events):
        if event.get("first_fault"):
            back = next((e["time"] for e in events[number:] if e["phase"] == "train"), None)
            found.append(back - event["time"] + event.get("still_seconds", 0.0) if back else 0.0)
    for struck in trial.struck:
        if next_row := next((row["time"] for row in rows if row["time"] > struck), None):
            found.append(next_row - struck)
    return max(found, default=None)


def left_of(folder: str) -> tuple[str, ...]:
    """Ranks, writers and placement groups of the cluster in `folder` that are still there, given a while to go.

    This process must be connected to it.
    """
    deadline = time.monotonic() + LEAVING
    while (found := (*_processes(folder), *_placement_groups())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _processes(folder: str) -> list[str]:
    """Processes of ranks and of their writers that belong to the cluster."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            ours = "cluster.workers.fork_server" in words or "orchestrator.checkpoint" in words
            if ours and folder in process.environ().get("RAY_AUTH_TOKEN_PATH", ""):
                found.append(f"process {process.pid}: {words[-80:]}")
        except psutil.Error:
            continue
    return found


def _placement_groups() -> list[str]:
    from ray.util.placement_group import placement_group_table

    return [
        f"placement group {key}"
        for key, group in placement_group_table().items()
        if group["state"] != "REMOVED"
    ]


def to_json(verdicts: Sequence[RunComparison]) -> list[dict[str, Any]]:
    """Each verdict as plain data, with whether it held."""
    return [{**dataclasses.asdict(verdict), "held": verdict.held} for verdict in verdicts]

"""One of the ranks stops, wherever it is: the run says which, on which node, and what the others wait in."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frozen_rank import PLACE
from jobs import job, rows, write_text
from local_run import LocalGang, drive_here

from cluster.workers.gang import GangStatus

STEPS = 6
LOOP, ENGINES = "orchestrator.train.loop", "orchestrator.train.engines"
POINTS = {
    "the start": ("main", 0),
    "reading the job": (f"{LOOP}:parse", 0),
    "joining the process group": (f"{LOOP}:open_device", 0),
    "opening the data": (f"{LOOP}:Tokens.open", 0),
    "making process groups": ("torch.distributed:new_group", 0),
    "initialising the weights": (f"{ENGINES}.torch_engine:TorchEngine.initialise", 0),
    "the first pass": (f"{ENGINES}.torch_passes:TorchPasses.compute_gradients", 0),
    "a sum of gradients": ("orchestrator.parallel.zero1:_Part._scatter", 2),
    "the norm of the gradients": (f"{ENGINES}.torch_passes:squared_norm", 2),
    "clipping": (f"{ENGINES}.trained_weights:clip_factor", 2),
    "the optimizer": (f"{ENGINES}.trained_weights:TrainedWeights.update", 3),
    "the agreement after a step": ("orchestrator.train.rank:agree", 3),
    "an evaluation": ("orchestrator.train.evaluation:Evaluator.evaluate", 0),
    "saving": ("orchestrator.checkpoint.saver:Saver.save", 0),
    "the last checkpoint": ("orchestrator.train.commits:Commits.finish", 0),
    "leaving the process group": (f"{LOOP}:close_device", 0),
}
"""Functions in the order in which a rank calls them first, and how many calls pass before the one that stops."""
VERIFYING = {
    "the repeated pass": (f"{ENGINES}.torch_engine:TorchEngine.compute_again", 0),
    "the comparison of gradients": ("orchestrator.train.verification:RunningCheck.gradients", 0),
    "the exchange of updates": (f"{ENGINES}.update_again:UpdateAgain._compute", 0),
    "the comparison of updates": ("orchestrator.train.verification:RunningCheck.update", 0),
}
"""Points of a verified step, where the others wait for messages between two ranks."""
TRAINING = list(POINTS)[list(POINTS).index("a sum of gradients") : list(POINTS).index("an evaluation")]
"""Points within a step, where the others wait in a collective."""


class OnNodes(LocalGang):
    """Ranks that stop as the environment says, each on a node of its own."""

    def start(self, world: int, bundle: Any, target: str, *arguments: Any, **more: Any) -> None:
        """See `Gang.start`."""
        super().start(world, bundle, "frozen_rank:main", *arguments, **more)

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        status = super().poll(saved, wait)
        ranks = tuple(dataclasses.replace(rank, node=f"node-{rank.rank}") for rank in status.ranks)
        return dataclasses.replace(status, ranks=ranks)


def place(rank: int, at: str, after: int, how: str = "freeze") -> dict[str, Any]:
    """A place where a rank stops, as `frozen_rank.PLACE` has it."""
    return {"rank": rank, "at": at, "after": after, "how": how}


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a job whose rank stops, and returns the event of the fault, which also ended the run."""

    def run(
        world: int, layout: dict[str, Any], *places: dict[str, Any], every: int | None = None
    ) -> dict[str, Any]:
        monkeypatch.setenv(PLACE, json.dumps(places))
        document = job(write_text(tmp_path, 20_000), steps=STEPS)
        document["resources"] = {"workers": {"min": world, "max": world}}
        if every is not None:
            document["resources"]["verify"] = {"every": every}
        document["parallel"] = layout
        document["data"]["validation"] = {"share": 0.1}
        document["evaluate"] = {"every": 4}
        document["limits"] = {"restarts": 0}
        gang = OnNodes([world])
        summary = drive_here(document, str(tmp_path / "run"), tmp_path / "cache", gang=lambda: gang)
        (event,) = [row for row in rows(tmp_path / "run", "events.jsonl") if row.get("first_fault")]
        assert summary["state"] == "failed"
        assert event["first_fault"] in summary["reason"]
        return event

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"), [*((point, 3) for point in POINTS), ("joining the process group", 0)]
)
def test_a_frozen_rank_of_eight_is_named(point: str, rank: int, fault: Callable[..., dict[str, Any]]) -> None:
    """Its heartbeats end; on a machine so busy that all come late, it is the hang that is seen.

    Asked for in ray#64993.
    """
    at, after = POINTS[point]
    event = fault(8, {"tp": 2, "zero": 1}, place(rank, at, after))
    assert re.match(f"rank {rank} on node-{rank}: no (sign of life|step) for ", event["first_fault"])
    assert (event["rank"], event["node"]) == (rank, f"node-{rank}")
    if point in TRAINING:
        assert "in collective" in event["first_fault"]
        assert "it is not; the others last completed collective" in event["first_fault"]


@pytest.mark.slow
@pytest.mark.parametrize("point", TRAINING)
@pytest.mark.parametrize("layout", [{"tp": 2, "zero": 1}, {"pp": 2, "zero": 0}], ids=["tp2", "pp2"])
def test_a_rank_of_four_that_lives_and_does_not_come_is_named(
    layout: dict[str, Any], point: str, fault: Callable[..., dict[str, Any]]
) -> None:
    """It sends heartbeats, so that only what the ranks report tells it from those that wait."""
    at, after = POINTS[point]
    if "pp" in layout and "scatter" in at:
        at = f"{ENGINES}.torch_passes:TorchPasses.sums"
    event = fault(4, layout, place(2, at, after, "sleep"))
    assert event["first_fault"].startswith("rank 2 on node-2: no step for ")
    assert "pp" in layout or "in collective" in event["first_fault"]
    assert "in _stop (frozen_rank.py:" in event["first_fault"]
    assert (event["rank"], event["node"]) == (2, "node-2")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freeze", "sleep"])
@pytest.mark.parametrize("point", VERIFYING)
def test_a_rank_of_four_that_stops_in_a_verified_step_is_named(
    point: str, how: str, fault: Callable[..., dict[str, Any]]
) -> None:
    """Whether it is silent or lives: with the last collective that it shared with others."""
    event = fault(4, {"zero": 1}, place(2, *VERIFYING[point], how), every=2)
    assert re.match("rank 2 on node-2: no (sign of life|step) for ", event["first_fault"])
    assert (event["rank"], event["node"]) == (2, "node-2")
    assert re.search(r"(last completed|its last was) collective \d+ of ", event["first_fault"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "how", "says"),
    [
        ("orchestrator.train.flight_record:records", "sleep", "sends heartbeats, but has not answered"),
        (f"{ENGINES}.torch_passes:TorchPasses.sums", "compute", "is behind too, but computes"),
    ],
    ids=["answers late", "computes"],
)
def test_a_healthy_rank_that_is_slow_is_not_the_missing_one(
    at: str, how: str, says: str, fault: Callable[..., dict[str, Any]]
) -> None:
    """As on a busy machine: it has not answered when the others have, or has not come to their collective."""
    norm, after = POINTS["the norm of the gradients"]
    slow = place(1, at, 0 if how == "sleep" else after, how)
    event = fault(4, {"tp": 2, "zero": 1}, place(2, norm, after, "sleep"), slow)
    assert event["first_fault"].startswith("rank 2 on node-2: no step for ")
    assert event["first_fault"].endswith(f"rank 1 on node-1 {says}")
    assert [line for line in event["output"] if "is missing" in line][1:] == []


def test_a_frozen_rank_of_two_is_named(fault: Callable[..., dict[str, Any]]) -> None:
    """One of the points for every day: the others, and ranks that live, take longer."""
    event = fault(2, {}, place(1, "orchestrator.train.rank:agree", 3))
    reason = event["first_fault"]
    assert re.match("rank 1 on node-1: no (sign of life|step) for ", reason)
    assert re.search(
        r"1 rank is in gather_rows \(rank_messages.py:\d+\); the others last completed collective \d+ of ranks 0, 1, "
        r"gloo:broadcast .*; it was training; it does not answer$",
        reason,
    )
    assert event["output"][0].startswith("rank 1 on node-1 is missing: 1 rank is in gather_rows")
    assert (event["rank"], event["node"]) == (1, "node-1")

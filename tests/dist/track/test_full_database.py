"""MLflow's database on a disk that is full for a while: rows wait, and arrive once each when there is room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import job
from tmpfs import mounted

from orchestrator.config.spec import parse
from orchestrator.observe.mlflow_delivery import Delivery, Tracker
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with mounted(tmp_path / "disk", "16m") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_database_holds_up_nothing_and_gets_each_step_once(disk: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{disk}/mlflow.db"
    run = RunDir(str(tmp_path / "run"))
    run.create()
    run.append("events.jsonl", [{"time": 1e9, "phase": "prepare", "attempt": 1}])
    spec = parse({**job("a.txt"), "tracking": {"uri": uri, "experiment": "full"}})
    tracker, slowest = Tracker(spec.tracked, run), 0.0

    def train(first: int, last: int) -> None:
        nonlocal slowest
        for step in range(first, last + 1):
            row = {"step": step, "attempt": 1, "time": 1e9 + step, "step_seconds": 0.5, "loss": 1 / step}
            run.append(METRICS, [row | {f"m{n}": step / 7 for n in range(20)}])
            began = time.monotonic()
            tracker.rows([row])
            slowest = max(slowest, time.monotonic() - began)

    def steps() -> list[int]:
        if not (disk / "mlflow.db").exists():
            return []  # this client would make it too, and disturb the tracker's
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("full")
        found = client.search_runs([experiment.experiment_id]) if experiment else []
        return [m.step for m in client.get_metric_history(found[0].info.run_id, "m19")] if found else []

    train(1, 20)
    until(lambda: len(steps()) == 20, tracker)
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                continue
        except OSError:
            pass
    train(21, 200)
    until(lambda: "full" in (tracker.problem or ""), tracker)
    assert len(steps()) < 200
    (disk / "filler").unlink()
    train(201, 220)
    tracker.status("FINISHED")
    assert tracker.close(60) == Delivery(0)
    assert steps() == list(range(1, 221))
    assert slowest < 10


def until(holds: Callable[[], bool], tracker: Tracker, seconds: float = 180.0) -> None:
    """Wait until it holds. Raises TimeoutError with what the tracker says."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(tracker.problem)
        time.sleep(0.2)

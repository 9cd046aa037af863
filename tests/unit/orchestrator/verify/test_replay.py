"""What is replayed, and how it is judged; the replay itself is tested with real ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text
from prepared import prepare_here
from scripted import drive

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.retention import remove
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task
from orchestrator.verify import replay as replays
from orchestrator.verify.replay import ReplayResult, replay


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, Path]:
    """A run of 12 steps with commits at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("ended")
    spec = parse(job(write_text(folder, 20_000)))
    prepare_here(spec, str(folder / "runs" / "_data"))
    drive(spec, str(folder / "runs" / "small"))
    return spec, folder / "runs" / "small"


@pytest.fixture
def run(ended: tuple[JobSpec, Path], tmp_path: Path) -> RunDir:
    return RunDir(str(shutil.copytree(ended[1], tmp_path / "small")))


@pytest.fixture
def spec(ended: tuple[JobSpec, Path]) -> JobSpec:
    return ended[0]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, run: RunDir) -> list[Task]:
    """The tasks given to ranks; instead of running them, the rows of the run are returned."""
    tasks: list[Task] = []
    recorded = {row["step"]: row for row in run.rows("metrics.jsonl")}

    def answer(
        world: int, bundle: object, entry: str, config: dict[str, Any], *more: object, **_: Any
    ) -> Any:
        tasks.append(task := Task(**config))
        return [recorded[step] for step in range((task.restore or 0) + 1, task.until + 1)], None

    monkeypatch.setattr(replays, "run_to_the_end", answer)
    return tasks


def test_a_replay_begins_at_the_earliest_commit(spec: JobSpec, run: RunDir, tasks: list[Task]) -> None:
    found = replay(spec, run, None, 3)
    (task,) = tasks
    assert (task.restore, task.until, task.commit, task.faults) == (4, 7, False, ())
    assert (task.run, task.layout["dp"]) == (run.uri, 2)
    assert (found.start, [row["step"] for row in found.rows], found.same) == (4, [5, 6, 7], True)
    assert found.line == "3 steps replayed: receipts equal, losses equal to the last bit"


@pytest.mark.parametrize(("step", "steps", "until"), [(8, 2, 10), (8, 99, 12), (4, 99, 12)])
def test_a_replay_ends_with_the_record(
    spec: JobSpec, run: RunDir, tasks: list[Task], step: int, steps: int, until: int
) -> None:
    assert len(replay(spec, run, step, steps).rows) == until - step
    assert tasks[0].until == until


def rewrite(run: RunDir, change: Any) -> None:
    rows = run.rows("metrics.jsonl")
    for row in rows:
        change(row)
    run.remove("metrics.jsonl")
    run.append("metrics.jsonl", rows)


@pytest.mark.parametrize(
    ("key", "value", "verdict"),
    [
        ("loss", 1.0000000000000002, "differs in loss"),
        ("samples", "f" * 32, "differs in samples"),
        ("step_seconds", 99.0, "same"),
    ],
)
def test_one_bit_makes_the_difference(
    spec: JobSpec, run: RunDir, tasks: list[Task], key: str, value: Any, verdict: str
) -> None:
    rewrite(run, lambda row: row.update({key: value}) if row["step"] == 6 else None)
    found = replay(spec, run, 4, 3)
    assert [row["verdict"] for row in found.rows] == ["same", verdict, "same"]
    assert found.same == (verdict == "same")
    if not found.same:
        assert found.line == "the replay differs at step 6"


def test_a_replay_stays_in_one_layout(spec: JobSpec, run: RunDir, tasks: list[Task]) -> None:
    rewrite(run, lambda row: row.update(layout="dp1 zero0 mb8") if row["step"] > 6 else None)
    replay(spec, run, 4, 8)
    assert tasks[0].until == 6


def test_a_layout_of_a_later_start_is_found(spec: JobSpec, run: RunDir, tasks: list[Task]) -> None:
    rewrite(run, lambda row: row.update(layout="dp1 zero0 mb8") if row["step"] > 4 else None)
    start = next(event for event in run.rows("events.jsonl") if event["phase"] == "start")
    layout = {**start["layout"], "dp": 1, "zero": 0, "micro_batch": 8}
    run.append("events.jsonl", [{**start, "layout": layout}])
    replay(spec, run, 4, 2)
    assert tasks[0].layout == layout


def test_a_layout_that_nobody_wrote_down_is_refused(spec: JobSpec, run: RunDir, tasks: list[Task]) -> None:
    rewrite(run, lambda row: row.update(layout="dp64 zero3 mb1"))
    with pytest.raises(InputError, match="the layout of step 5, dp64 zero3 mb1, is not on record"):
        replay(spec, run, 4, 2)
    assert tasks == []


@pytest.mark.parametrize(("step", "known"), [(5, "4, 8"), (12, "4, 8"), (0, "4, 8")])
def test_a_commit_that_does_not_serve_is_refused(
    spec: JobSpec, run: RunDir, tasks: list[Task], step: int, known: str
) -> None:
    with pytest.raises(InputError, match=f"there is no commit at step {step} .*choose from: {known}"):
        replay(spec, run, step, 2)
    assert tasks == []


def test_a_run_whose_commits_are_followed_by_nothing(spec: JobSpec, run: RunDir) -> None:
    run.log("metrics.jsonl").cut(4)
    with pytest.raises(InputError, match="no commit is followed by recorded steps"):
        replay(spec, run, None, 2)


def test_a_replay_of_no_step_proves_nothing() -> None:
    assert not ReplayResult(4, []).same
    document = ReplayResult(4, [{"step": 5, "verdict": "same"}]).to_json()
    assert (document["same"], document["start"]) == (True, 4)
    json.dumps(document)


def test_a_commit_that_a_run_at_work_removes_is_followed_by_the_next(
    spec: JobSpec, run: RunDir, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = replays.run_to_the_end

    def late(*words: Any, **keywords: Any) -> Any:
        if not tasks:
            remove(Store(run.commits), 4, Store(run.commits).backend.list())
            answer(*words, **keywords)
            raise RuntimeError("rank 0 failed")
        return answer(*words, **keywords)

    monkeypatch.setattr(replays, "run_to_the_end", late)
    found = replay(spec, run, None, 3)
    assert (found.start, found.same, [task.restore for task in tasks]) == (8, True, [4, 8])

"""Rows that were deleted, cut out or altered between two controllers: found again where there is a copy, else told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job, rows

from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.row_recovery import without
from orchestrator.controller.run_history import RunHistory
from orchestrator.storage.row_line import EVENTS, METRICS
from orchestrator.storage.run_directory import RunDir

CARRIED = range(17, 21)
"""Steps whose rows the commit at step 20 carries."""


def row(step: int) -> dict[str, Any]:
    return {
        "step": step, "attempt": 1, "time": 1e9 + step / 8, "step_seconds": 0.125, "loss": 1 / step, "tokens": 8 * step,
        "samples": f"{step:032x}", "layout": "dp2 zero0 mb4", "memory_bytes": 7, "saves": [],
    }  # fmt: skip


def spec_of(**more: Any) -> JobSpec:
    return parse({**job("a.txt"), **more})


@pytest.fixture(params=["disk", "objects"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    """Twenty-four steps and a commit at step 20, left by a controller that wrote its last status."""
    run = RunDir(str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path}/run")
    return begun(run, spec_of())


def begun(run: RunDir, spec: JobSpec) -> RunDir:
    run.create()
    record = RunHistory(spec, run)
    record.track()
    record.roll_back(frozenset(), 1)
    record.event(1, 0, "start", "2 workers", layout_after="dp2 zero0 mb4")
    for first in range(1, 25, 4):
        record.take([row(n) for n in range(first, first + 4)])
    piece = RawPiece("model.w", "F32", (4,), (0,), (4,), memoryview(bytes(16)))
    meta = {"position": 160, "receipt": row(20)["samples"], "rows": [row(n) for n in CARRIED]}
    record.commits.store.publish(20, record.commits.store.write_raw(20, 0, [piece]), meta)
    record.event(1, 24, "stop", "a fault ended the attempt", first_fault="died")
    record.copies.tracker.close(60)
    run.write_json(
        "status.json", {"time": 1e9, "rows": record.files.metrics.mark, "events": record.files.events_stored}
    )
    return run


def lose(run: RunDir, lost: set[int]) -> None:
    """Take the rows of these steps away, whatever file or part they are in."""
    kept = [row for row in run.rows(METRICS) if row["step"] not in lost]
    run.log(METRICS).remove()
    run.append(METRICS, kept)


def resumed(run: RunDir, spec: JobSpec | None = None) -> RunHistory:
    record = RunHistory(spec or spec_of(), RunDir(run.uri))
    record.roll_back(frozenset(), 2)
    return record


def told(record: RunHistory) -> list[str]:
    return [event["reason"] for event in record.events if event.get("missing_rows") is not None]


def test_nothing_is_told_where_nothing_is_lost(run: RunDir) -> None:
    record = resumed(run)
    assert (told(record), record.event_history.missing, record.step) == ([], [], 20)
    assert run.rows(METRICS) == [row(n) for n in range(1, 21)]


def test_a_gap_is_told_once_with_what_a_commit_had_of_it(run: RunDir) -> None:
    lose(run, {3, 4, 9, 18, 19, 22})
    record = resumed(run)
    assert told(record) == [
        "rows of step 3 to 4, 9, 18 to 19 were lost from metrics.jsonl: 2 recovered; step 3 to 4, 9 "
        "cannot be recovered"
    ]
    assert record.event_history.missing == [[3, 4], [9, 9]]
    assert run.rows(METRICS) == [row(n) for n in range(1, 21) if n not in (3, 4, 9)]
    run.write_json("status.json", {"rows": record.files.metrics.mark})
    again = resumed(run)
    assert (len(told(again)), again.event_history.missing) == (1, [[3, 4], [9, 9]])
    run.remove("status.json")
    assert len(told(resumed(run))) == 1, "where everything is read, too"


@pytest.mark.parametrize("kept", [0, 1, 12])
def test_an_end_that_was_cut_off_is_missed(run: RunDir, kept: int) -> None:
    run.log(METRICS).cut(kept)
    record = resumed(run)
    assert record.event_history.missing == [[kept + 1, 16]]
    assert run.rows(METRICS) == [row(n) for n in range(1, 21) if n <= kept or n in CARRIED]
    assert record.step == 20


def test_a_row_that_was_altered_in_its_place_is_missed_at_the_end(tmp_path: Path) -> None:
    run = begun(RunDir(str(tmp_path)), spec_of())
    path = tmp_path / METRICS
    path.write_bytes(
        path.read_bytes().replace(b'"tokens": 64', b'"tokens": 65').replace(b'"step": 19', b'"step": 91')
    )
    record = resumed(run)
    assert told(record) == []
    assert record.counted(2, 20).missing == [(8, 8)]
    assert told(record) == [
        "rows of step 8, 19 were lost from metrics.jsonl: 1 recovered; step 8 cannot be recovered"
    ]
    assert run.rows(METRICS) == [row(n) for n in range(1, 21) if n != 8]


def test_lines_out_of_order_come_into_order(tmp_path: Path) -> None:
    run = begun(RunDir(str(tmp_path)), spec_of())
    path = tmp_path / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[6], lines[5], lines[4], *lines[7:9], lines[2], *lines[9:]]))
    run.remove("status.json")
    record = resumed(run)
    assert run.rows(METRICS) == [row(n) for n in range(1, 21)]
    assert record.event_history.missing == []


def test_a_run_that_a_search_began_with_a_commit_misses_nothing_before_it(run: RunDir) -> None:
    lose(run, set(range(1, 9)))
    run.write_json("origin.json", {"donor": "0001", "step": 8})
    assert told(resumed(run)) == []


def lost_events(record: RunHistory) -> list[Any]:
    return [event["missing_events"] for event in record.events if event.get("missing_events")]


@pytest.mark.parametrize(
    ("lost", "gaps"), [({1}, [[1, 1]]), ({2}, [[2, 2]]), ({3}, [[3, 3]]), ({1, 2, 3}, [[1, 3]])]
)
def test_a_lost_event_is_told_once(run: RunDir, lost: set[int], gaps: list[list[int]]) -> None:
    """The first, one in the middle, the last and all: with the last, `status.json` says how many there were."""
    known = run.rows(EVENTS)
    assert [event["number"] for event in known] == [1, 2, 3]
    run.log(EVENTS).remove()
    run.append(EVENTS, [event for event in known if event["number"] not in lost])
    for _ in range(2):
        record = resumed(run)
        assert lost_events(record) == [gaps]
        assert record.files.events_stored == record.event_history.number
    steps = f"{gaps[0][0]} to {gaps[0][1]}" if len(lost) > 1 else str(gaps[0][0])
    reason = f"events {steps} were lost from events.jsonl: no total includes them"
    assert reason in [event["reason"] for event in run.rows(EVENTS)]


def test_events_of_the_version_before_have_no_numbers_and_nothing_is_told_of_them(run: RunDir) -> None:
    old = [{key: event[key] for key in event if key != "number"} for event in run.rows(EVENTS)]
    run.log(EVENTS).remove()
    run.append(EVENTS, old)
    run.remove("status.json")
    record = resumed(run)
    assert (lost_events(record), record.events[-1]["number"]) == ([], 4)
    run.log(EVENTS).remove()
    run.append(EVENTS, old[1:])
    run.append(EVENTS, record.events[3:])
    assert lost_events(resumed(run)) == [[[3, 3]]]


def test_events_may_be_lost_too(tmp_path: Path) -> None:
    run = begun(RunDir(str(tmp_path)), spec_of())
    (tmp_path / "events.jsonl").write_text('{"time": 1e9, "attempt": 1, "pha\n\0\0\n[3]\n"x"\n')
    record = resumed(run)
    assert (record.attempts, record.step, record.events[0]["reason"]) == (2, 20, "resumed")


@pytest.mark.slow
def test_mlflow_has_the_numbers_of_what_is_lost(tmp_path: Path) -> None:
    """To the last bit; texts are told where events and manifests have them."""
    spec = spec_of(tracking={"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "lost"})
    run = begun(RunDir(str(tmp_path / "run")), spec)
    lose(run, set(range(1, 25)) - {5, 6})
    record = resumed(run, spec)
    assert told(record) == ["rows of step 1 to 4, 7 to 16 were lost from metrics.jsonl: 14 recovered"]
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == list(range(1, 21))
    texts = {"samples": None, "copied_from": "mlflow"}
    assert found[6] == {**{k: v for k, v in row(7).items() if k != "saves"}, **texts}
    assert type(found[6]["tokens"]) is int
    assert found[4] == row(5)


def test_mlflow_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    run = begun(RunDir(str(tmp_path / "run")), spec_of())
    lose(run, {3})
    spec = spec_of(tracking={"uri": "http://127.0.0.1:9", "experiment": "lost"})
    assert resumed(run, spec).event_history.missing == [[3, 3]]


def test_what_is_left_of_gaps() -> None:
    assert without([(1, 4), (7, 7)], {2: {}, 7: {}}) == [(1, 1), (3, 4)]

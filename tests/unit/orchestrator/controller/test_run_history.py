"""What is written down of a run; how a controller uses it is tested with the controller."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job
from sockets import silent

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import CONTINUED
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import load, parse
from orchestrator.controller.run_history import RunHistory
from orchestrator.observe.totals import totals_of
from orchestrator.storage import row_files, row_log
from orchestrator.storage.run_directory import ORIGIN, RunDir


def row(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "step_seconds": 0.5, "time": 1000.0 + step, **more}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(str(tmp_path / "small"))
    found.create()
    return found


def test_a_record_begins_with_the_job(run: RunDir) -> None:
    spec = parse(job("a.txt"))
    record = RunHistory(spec, run)
    assert load(Path(run.path) / "job.yaml") == spec
    assert (record.attempts, record.step, record.step_seconds) == (0, 0, 0.0)
    (event,) = run.rows("events.jsonl")
    assert (event["phase"], event["reason"], event["attempt"], event["last_seen"]) == (
        "prepare",
        "begun",
        0,
        None,
    )
    assert record.events == [event]


def test_an_event_has_no_secret_of_an_error(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    what = "cannot be read (403, url='http://ann:SECRET@host/a.txt')"
    record.event(1, 0, "prepare", what, first_fault=f"rank 0: {what}")
    record.close()
    assert run.rows("events.jsonl")[-1]["first_fault"] == f"rank 0: {what}".replace("SECRET", "***")
    assert not [
        path for path in Path(run.path).rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()
    ]


def test_the_steps_of_a_rollout_count_with_their_mean(run: RunDir) -> None:
    """Its first step waits for all answers: a median over single steps would promise an end that never comes."""
    record = RunHistory(parse(job("a.txt")), run)
    seconds = [9.0, 1.0, 2.0, 10.0, 1.0, 1.0, 50.0]
    firsts = [{"transfer_seconds": 0.1} if step % 3 == 0 else {} for step in range(7)]
    record.take([row(n + 2, 1, step_seconds=seconds[n], **firsts[n]) for n in range(7)])
    assert record.step_seconds == 4.0


def test_a_record_is_taken_up_where_it_was(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    record.event(3, 7, "train", "the first step")
    record.take([row(n, 3, step_seconds=float(n)) for n in range(1, 26)])
    run.write_json("status.json", {"time": 5.0})
    again = RunHistory(parse(job("a.txt")), run)
    assert (again.attempts, again.step) == (3, 25)
    assert again.step_seconds == 13.0
    assert (again.events[-1]["reason"], again.events[-1]["last_seen"]) == ("resumed", 5.0)
    assert (again.events[-1]["attempt"], again.events[-1]["step"]) == (3, 25)


def test_rows_are_counted_as_they_are_stored(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    record.take([row(1), row(2)])
    record.take([])
    record.take([row(3)])
    assert record.files.saved == 3
    assert [r["step"] for r in run.rows("metrics.jsonl")] == [1, 2, 3]
    assert record.files.after(1) == [row(2), row(3)]


def test_rows_are_kept_if_a_trace_cannot_start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trains: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = RunHistory(parse(job("a.txt")), run)
    monkeypatch.setattr(record.trace, "look", full)
    with pytest.raises(OSError, match="No space left"):
        record.take([row(1), row(2)])
    record.files.wait_until_stored()
    assert (record.step, [r["step"] for r in run.rows("metrics.jsonl")]) == (2, [1, 2])
    record.close()


def test_without_a_commit_everything_is_rolled_back(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    record.take([row(1), row(2)])
    assert record.roll_back(frozenset(), 1) == (None, [])
    assert (run.rows("metrics.jsonl"), record.step, record.files.saved) == ([], 0, 0)


def test_rows_that_a_commit_of_another_run_carries_stay_that_run_s(run: RunDir) -> None:
    """A trial that goes on from another's commit has not spent what that one has."""
    store = Store(run.at("checkpoints"))
    meta = {"position": 1, "receipt": "0" * 32, "rows": [row(7), row(8)]}
    store.publish(8, store.write_raw(8, 0, []), meta)
    run.write_json(ORIGIN, {"donor": "0000", "asked": 8, "step": 8, "config": {}})
    record = RunHistory(parse(job("a.txt")), run)
    commit, _ = record.roll_back(frozenset(), 1)
    assert commit is not None
    assert (commit.step, run.rows("metrics.jsonl"), record.files.recent) == (8, [], ())
    record.take([row(9)])
    again = RunHistory(parse(job("a.txt")), run)
    again.roll_back(frozenset(), 2)
    assert run.rows("metrics.jsonl") == []
    assert again.event_history.missing == []


@pytest.mark.parametrize("lost", [None, '{"run": "x'])
def test_where_a_run_began_is_told_by_its_commit(run: RunDir, lost: str | None) -> None:
    """Else the rows of the steps before would be missing, which are another run's."""
    told = {"run": "first", "step": 8, "position": 1, "receipt": "0" * 32}
    store = Store(run.at("checkpoints"))
    store.publish(
        9, store.write_raw(9, 0, []), {"position": 1, "receipt": "0" * 32, "rows": [], CONTINUED: told}
    )
    run.append("metrics.jsonl", [row(9)])
    if lost is not None:
        run.write_text(ORIGIN, lost)
        with pytest.raises(InputError, match=r"origin\.json: is damaged; put it back; a run with"):
            totals_of(run)
    record = RunHistory(parse(job("a.txt")), run)
    record.roll_back(frozenset(), 1)
    assert run.read_json(ORIGIN) == told
    assert (record.event_history.missing, totals_of(run).missing) == ([], [])


def test_only_the_attempt_that_was_begun_may_commit(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    record.roll_back(frozenset(), 3)
    assert (Path(run.path) / "checkpoints/ATTEMPT").read_text() == "3\n"


def test_holders_on_lost_nodes_are_not_waited_for(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    with silent() as (address, calls):
        record.commits.use_snapshot_servers("token", [{"node": "n1", "address": address}])
        record.commits.leave_out({"n1"})
        began = time.monotonic()
        assert record.last_commit() == (None, [])
        assert (time.monotonic() - began < 5, calls()) == (True, 0)


def test_training_began_with_its_first_step(run: RunDir) -> None:
    record = RunHistory(parse(job("a.txt")), run)
    late = time.time() + 100
    record.take([row(1, 1, time=late), row(2, 2, time=late + 5)])
    assert record.training_began(2) == late + 4.5
    record.take([row(1, 5, time=late, evaluation_seconds=3.0)])
    assert record.training_began(5) == late - 3.5  # that was evaluated before the first step
    assert record.training_began(3) == pytest.approx(time.time(), abs=5)
    record.take([row(3, 4, time=1.0)])
    assert record.training_began(4) == record.events[-1]["time"]  # a clock that is behind


def test_whoever_reads_the_latest_rows_is_not_disturbed_by_new_ones(run: RunDir) -> None:
    """The status is asked for in another thread than the one that takes rows."""
    record = RunHistory(parse(job("a.txt")), run)
    record.take([row(1), row(2)])
    reading = iter(record.files.recent)
    next(reading)
    record.take([row(3)])
    record.roll_back(frozenset(), 1)
    assert [r["step"] for r in reading] == [2]


@pytest.mark.parametrize("place", ["disk", "objects"])
def test_a_recovery_costs_what_it_costs_however_long_the_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows parsed and bytes read, where a record is opened and where it is rolled back."""
    count = {"rows": 0, "bytes": 0}
    decode = row_log.decode
    monkeypatch.setattr(
        row_log, "decode", lambda line, name: [count.update(rows=count["rows"] + 1), decode(line, name)][1]
    )
    for kind in (row_files.FileView, row_files.PartsView):

        def read(view: Any, start: int, end: int, plain: Any = kind.read) -> bytes:
            data = plain(view, start, end)
            count["bytes"] += len(data)
            return data

        monkeypatch.setattr(kind, "read", read)
    spent = []
    for steps in (300, 30_000):
        run = RunDir(f"memory://{tmp_path}/{steps}" if place == "objects" else str(tmp_path / str(steps)))
        run.create()
        run.append("metrics.jsonl", [row(n) for n in range(1, steps + 1)])
        run.write_json("status.json", {"rows": {"step": steps, "bytes": run.log("metrics.jsonl").size()}})
        store = Store(run.at("checkpoints"))
        meta = {"position": 1, "receipt": "0" * 32, "rows": [row(steps - 10)]}
        store.publish(steps - 10, store.write_raw(steps - 10, 0, []), meta)
        count.update(rows=0, bytes=0)
        record = RunHistory(parse(job("a.txt")), run)
        assert len(record.files.after(steps - 10)) == 10
        record.roll_back(frozenset(), 2)
        record.take([row(n, 2) for n in range(steps - 9, steps)])
        record.roll_back(frozenset(), 3)
        assert (record.step, record.event_history.missing) == (steps - 10, [])
        spent.append((count["rows"], count["bytes"]))
    assert spent[1][0] <= spent[0][0] + 5, spent
    assert spent[1][1] <= 12 * (1 << 16), spent


def committed(run: RunDir, step: int) -> Path:
    """A commit of one tensor; returns its shard."""
    store = Store(run.commits)
    values = torch.full((64, 3), float(step))
    records = store.write_shard(step, 0, [TensorPiece("model.w", (64, 3), (0, 0), values)])
    meta = {"position": step, "receipt": "0" * 32, "rows": [row(step)]}
    store.publish(step, records, meta)
    (shard,) = Path(run.path, f"checkpoints/step-{step:08d}").glob("*.safetensors")
    return shard


def test_a_commit_is_passed_over_that_is_damaged_indeed(run: RunDir) -> None:
    """A rank that reads wrongly does not take the run back, and removes no commit."""
    committed(run, 4)
    shard = committed(run, 8)
    record = RunHistory(parse(job("a.txt")), run)
    commit, notes = record.roll_back(frozenset({8}), 1)
    assert (commit.step if commit else 0, notes) == (
        8,
        ["the commit at step 8 is kept: a rank reported damage, but a full check found none"],
    )
    assert record.commits.store.steps() == [4, 8]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    commit, notes = record.roll_back(frozenset({12}), 2)
    assert (commit.step if commit else 0, notes) == (
        8,
        ["a commit is passed over: step 12: a rank found it damaged or gone"],
    )
    commit, notes = record.roll_back(frozenset({8}), 3)
    assert (commit.step if commit else 0, notes) == (
        4,
        ["a commit is passed over: step 8: a rank found it damaged or gone"],
    )
    assert record.commits.store.steps() == [4]
    committed(run, 8)
    commit, notes = record.roll_back(frozenset(), 4)
    assert (commit.step if commit else 0, notes) == (8, [])


def test_a_run_whose_commits_are_all_damaged_or_gone_does_not_begin_anew(run: RunDir) -> None:
    """Nothing of them is removed; one that never made a commit begins anew."""
    record = RunHistory(parse(job("a.txt")), run)
    record.take([row(1)])
    assert record.roll_back(frozenset(), 1) == (None, [])
    shards = [committed(run, step) for step in (4, 8)]
    published = [{"step": 8, "state": "published"}]
    record.take([row(step, saves=published if step == 9 else []) for step in range(1, 10)])
    record.files.wait_until_stored()
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        InputError, match=r"no commit of the run is sound \(step 4: .*; step 8: .*\); put a copy"
    ):
        record.roll_back(frozenset(), 2)
    assert record.commits.store.steps() == [4, 8]
    assert [stored["step"] for stored in run.rows("metrics.jsonl")] == list(range(1, 10))
    record.close()
    with pytest.raises(InputError, match="no commit of the run is sound"):
        RunHistory(parse(job("a.txt")), run)
    shutil.rmtree(Path(run.path, "checkpoints"))
    with pytest.raises(InputError, match="the checkpoints of the run are gone; one was at step 8"):
        RunHistory(parse(job("a.txt")), run)


def test_a_run_whose_one_commit_was_in_memory_begins_anew_where_that_is_gone(run: RunDir) -> None:
    """Its second attempt started from the memory of other nodes, before any commit was in storage."""
    record = RunHistory(parse(job("a.txt")), run)
    record.event(1, 0, "start", "2 workers from the beginning")
    record.event(2, 1, "start", "2 workers from the commit at step 1")
    record.take([row(1), row(2, 2, saves=[{"step": 1, "state": "held"}])])
    record.files.wait_until_stored()
    record.close()
    assert RunHistory(parse(job("a.txt")), run).roll_back(frozenset(), 3) == (None, [])

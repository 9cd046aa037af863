"""The last commit of a task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.checkpoint.commit_store import Store
from orchestrator.train import commits as module
from orchestrator.train.commits import Commits


def commits(folder: Path) -> Commits:
    """Those of a run that has no other nodes."""
    found = object.__new__(Commits)
    found._store = Store(str(folder))
    found._unsaved = 600.0
    return found


def test_rows_wait_for_the_snapshots_of_their_steps(tmp_path: Path) -> None:
    """Of the step before too, while it is not known whether that snapshot is whole; never of more than two."""
    found, released = commits(tmp_path), list[int]()
    found._context = SimpleNamespace(release=released.append)  # type: ignore[assignment]
    found._last_snapshot = found._complete = -1
    assert found.rows_to_hold(7) == 0
    found._last_snapshot = 7
    assert found.rows_to_hold(7) == 2
    found.note_agreed(SimpleNamespace(snapshot_step=7))  # type: ignore[arg-type]
    assert (found.rows_to_hold(8), released) == (0, [7])
    found._last_snapshot = 8
    assert found.rows_to_hold(8) == 1
    found.note_agreed(SimpleNamespace(snapshot_step=7))  # type: ignore[arg-type]
    found._last_snapshot = 9
    assert (found.rows_to_hold(9), released) == (2, [7])
    found.note_agreed(SimpleNamespace(snapshot_step=-1))  # type: ignore[arg-type]
    assert found.rows_to_hold(12) == 2


def test_memory_is_reserved_for_what_later_steps_save_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, prepared = commits(tmp_path), list[Any]()
    found._task = SimpleNamespace(commit=True)  # type: ignore[assignment]
    found._gpus = 1
    found._engine = SimpleNamespace(state=lambda: iter(["weights"]))  # type: ignore[assignment]
    found._extra_pieces, found._reserved_pieces = list, lambda: ["answers"]  # type: ignore[list-item, return-value]
    monkeypatch.setattr(found, "_open_saver", lambda: SimpleNamespace(prepare=prepared.extend))
    found.__enter__()
    assert prepared == ["weights", "answers"]


def context_of(rank: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rank_info=SimpleNamespace(rank=rank), set_waiting=lambda on: None, end_work=lambda: None, **more
    )


class Writer:
    """Writes nothing, and fails at nothing."""

    failed_step = -1

    def close(self, timeout: float) -> list[Any]:
        return []

    def tell_failed(self, steps: Any) -> None:
        pass


def test_a_last_commit_that_is_tried_again_says_why_and_how_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> Any:
        tries.append("again")
        if len(tries) == 3:
            found._latest = (900, "")
        return Writer()

    tries: list[Any] = []
    monkeypatch.setattr(module, "gather_json", lambda told: [told])
    monkeypatch.setattr(module, "agree", lambda *told, **_: SimpleNamespace(stop=False, failures=told[2]))
    monkeypatch.setattr(module, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(module, "FINISH_TIMEOUT", 1.0)
    found = commits(tmp_path)
    found._context = context_of(  # type: ignore[assignment]
        0, begin_work=lambda *work: tries.append(work), progressed=lambda: None, release=lambda step: None
    )
    found._task = SimpleNamespace(restore=None, token="x")  # type: ignore[assignment]
    found._saved, found._saver, found._latest = 900, Writer(), (900, "the disk is full")  # type: ignore[assignment]
    found._complete = 898
    monkeypatch.setattr(found, "_open_saver", opened)
    monkeypatch.setattr(found, "_save", lambda *args, **options: None)
    found.finish({"step": 900})
    assert tries == [
        ("the save at step 900 failed (the disk is full) and is tried again", "tries", 100),
        "again",
        "again",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_the_last_commit_rank_0_hears_from_the_others_before_it_waits_for_them(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class FailedWriter:
        """The save has failed, as `close` finds out."""

        failed_step = -1

        def close(self, timeout: float) -> list[Any]:
            done.append("close")
            self.failed_step = 900
            return []

        def tell_failed(self, steps: Any) -> None:
            done.append(steps)

    def gathered(told: Any) -> Any:
        done.append(told)
        return [[-1, ""], [900, "the disk is full"]]

    agreed = SimpleNamespace(stop=True, failures=1)
    monkeypatch.setattr(module, "gather_json", gathered)
    monkeypatch.setattr(module, "agree", lambda *told, **_: done.append(told[2]) or agreed)
    found = commits(tmp_path)
    found._context = context_of(rank)  # type: ignore[assignment]
    found._task = SimpleNamespace(restore=None)  # type: ignore[assignment]
    found._saved, found._saver, found._latest = 900, FailedWriter(), (900, "it fails")  # type: ignore[assignment]
    if rank == 0:
        with pytest.raises(OSError, match="the commit at step 900 failed: it fails; the disk is full"):
            found.finish({"step": 900})
        assert done == [[-1, "it fails"], [-1, 900], "close", 1]
    else:
        found.finish({"step": 900})
        assert done == ["close", [900, "it fails"], [-1, 900], 0]


def test_the_last_commit_releases_the_rows_that_wait_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop may come between two steps, where no row says that it is the last."""
    released: list[int] = []
    monkeypatch.setattr(module, "gather_json", lambda told: [told])
    monkeypatch.setattr(module, "agree", lambda *told, **_: SimpleNamespace(stop=False, failures=told[2]))
    found = commits(tmp_path)
    found._context = context_of(0, release=released.append)  # type: ignore[assignment]
    found._task = SimpleNamespace(restore=None)  # type: ignore[assignment]
    found._saved, found._saver, found._latest = 900, Writer(), (900, "")  # type: ignore[assignment]
    found._last_snapshot, found._complete = 900, 898
    found.finish({"step": 900})
    assert (released, found.rows_to_hold(900)) == ([900], 0)

"""A run that leaves out a window of samples after an instability is the run that never had that window."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from harness import finished
from jobs import job, write_text
from prepared import prepare_here

from cluster.workers.gang import FINISHED, Bundle
from cluster.workers.process_gang import ProcessGang
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.data.samples.skips import Skip, next_skip
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import Task

STEPS, BATCH = 12, 8
SCALED = {"lr_scale": 0.5}


class Tasks:
    """Makes tasks of one job over data prepared once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._text = folder, write_text(folder, 20_000)
        self.spec = parse(job(self._text, stability=SCALED))
        self._data = prepare_here(self.spec, str(folder / "cache"))

    def run(self, name: str) -> str:
        return str(self._folder / name)

    def task(
        self, run: str, restore: int | None = None, until: int = STEPS, dp: int = 1, **more: Any
    ) -> dict[str, Any]:
        """A task of the run named so; `train` changes the job's section."""
        spec = parse(job(self._text, **{"stability": SCALED, **more.pop("train", {})}))
        layout = Layout(dp=dp, micro_batch=4).to_json()
        document, uri = spec.model_dump(mode="json"), self.run(run)
        return Task(document, layout, uri, self._data, 1, restore, until, token="test", **more).to_json()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return Tasks(tmp_path_factory.mktemp("stability"))


@pytest.fixture(scope="module")
def found(tasks: Tasks, gang: ProcessGang) -> dict[str, Any]:
    """Rows and error of each task, from one process; runs `one` and `left out` have their commits on disk."""
    window = (Skip(7, 6 * BATCH, BATCH, 0.5).to_json(),)
    calm = {"optimizer": {"lr": 1e-9, "schedule": "constant"}, "steps": 60}
    spiky = {"train": {**calm, "stability": {"spike": 0.5, "window": 8}}}
    (result,) = finished(
        1,
        {
            "until 4": tasks.task("one", until=4),
            "poisoned": tasks.task("one", 4, faults=("nan@0:7",), commit=False),
            "rolled back": tasks.task("one", 4, until=8, skips=window),
            "resumed": tasks.task("one", 8),
            "left out": tasks.task("other", skips=window),
            "spike": tasks.task("calm", until=60, **spiky),
            "before the spike": tasks.task("calm again", until=9, **spiky),
            "spike again": tasks.task("calm again", 9, until=60, commit=False, **spiky),
        },
        "rank_tasks:alone",
        gang,
    )
    return result


def test_the_window_never_was(tasks: Tasks, found: dict[str, Any]) -> None:
    """Rolled back, resumed from a commit that knows of the window by itself: the same bits, receipt included."""
    parts = [*found["until 4"]["rows"], *found["rolled back"]["rows"], *found["resumed"]["rows"]]
    assert [row["step"] for row in parts] == list(range(1, STEPS + 1))
    assert parts == found["left out"]["rows"]
    assert parts[-1]["tokens"] == STEPS * BATCH * 32


def test_the_fault_says_what_to_leave_out(tasks: Tasks, found: dict[str, Any]) -> None:
    error = found["poisoned"]["error"]
    assert error.startswith("NonFinite: loss is nan at step 7, samples from position 48")
    assert found["poisoned"]["at"] == [7, 6 * BATCH]
    assert next_skip(tasks.spec.train.stability, BATCH, (), 7, 6 * BATCH) == Skip(7, 6 * BATCH, BATCH, 0.5)


def test_the_learning_rate_is_lower_from_the_step_on(found: dict[str, Any]) -> None:
    plain, lowered = found["until 4"]["rows"], found["left out"]["rows"]
    assert [row["lr"] for row in lowered[:4]] == [row["lr"] for row in plain]
    rates = [row["lr"] for row in lowered]
    assert rates[6] < 0.6 * rates[5]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[5:]))


def test_a_commit_knows_what_was_left_out(tasks: Tasks, found: dict[str, Any]) -> None:
    store = Store(tasks.run("one") + "/checkpoints")
    assert [skip["start"] for skip in store.manifest(12).meta["skips"]] == [48]
    assert store.manifest(12).position == (STEPS + 1) * BATCH
    assert store.manifest(4).meta["skips"] == []


def test_a_spike_is_seen_alike_after_a_restart(found: dict[str, Any]) -> None:
    """The losses before it come with the commit."""
    error = found["spike"]["error"]
    assert error.startswith("LossSpike: loss ")
    assert len(found["spike"]["rows"]) >= 9
    assert found["before the spike"]["error"] == ""
    assert found["spike again"]["error"].partition(" (")[0] == error.partition(" (")[0]


def test_all_ranks_raise_at_one_step_and_other_layouts_leave_out_the_same(
    tasks: Tasks, found: dict[str, Any], gang: ProcessGang
) -> None:
    """Two ranks go on from the commit of one, which names the window, until one of them is poisoned."""
    task = tasks.task("one", 8, dp=2, faults=("nan@1:11",), commit=False)
    ranks = finished(2, task, "rank_tasks:together", gang)
    rows, wanted = ranks[0]["rows"], found["left out"]["rows"][8:10]
    assert [(row["step"], row["samples"]) for row in rows] == [(r["step"], r["samples"]) for r in wanted]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in wanted], rel=1e-5)
    assert len({rank["error"].partition(" (")[0] for rank in ranks}) == 1
    assert "at step 11, samples from position 88" in ranks[1]["error"]


def test_an_error_is_told_before_anything_is_left_in_order(tasks: Tasks, gang: ProcessGang) -> None:
    """Leaving a group, freeing pinned memory or ending a commit may wait for ever; the cause is known all the same."""
    task = tasks.task("stubborn", until=4, faults=("raise@0:3",))
    gang.start(1, Bundle(), "rank_tasks:stubborn", task)
    deadline = time.monotonic() + 90
    while (rank := gang.poll(0, wait=0.2).ranks[0]).state not in FINISHED:
        assert time.monotonic() < deadline
    gang.stop()
    assert (rank.state, rank.step, rank.cause.name) == ("failed", 2, "InjectedFault")

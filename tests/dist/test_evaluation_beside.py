"""Evaluations beside a run: the bits of the gang's own, whatever dies; and training as if there were none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from lasting_gang import lasting_gang
from local_run import LocalGang, controller_here, drive_here, with_evaluator

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import attached
from orchestrator.config.outcome import Outcome
from orchestrator.controller import background_evaluation, decide

DUE = [0, 5, 10, 12]
ROOM = 3
"""For two ranks and an evaluation."""


def evaluated(text: str, where: str = "beside", **evaluate: Any) -> dict[str, Any]:
    """A job that holds out a third of its documents."""
    document = job(text)
    document["data"]["validation"] = {"share": 0.34}
    document["parallel"] = {"micro_batch": 2}
    document["evaluate"] = {"every": 5, "at_start": True, "where": where, **evaluate}
    return document


def of_sets(run: Path) -> list[dict[str, Any]]:
    """Step and metrics of each evaluation in evals.jsonl."""
    return [{"step": row["step"], **row["sets"]} for row in rows(run, "evals.jsonl")]


def told(run: Path, what: str) -> list[str]:
    """The reasons of events in which that stands."""
    return [event["reason"] for event in rows(run, "events.jsonl") if what in event["reason"]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 40_000)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def gang(text: str, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin that evaluates between its steps."""
    run = tmp_path_factory.mktemp("runs") / "gang"
    drive_here(evaluated(text, "gang"), str(run), cache)
    return run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed try is repeated at once."""
    monkeypatch.setattr(decide, "RETRY", 0.0)


def same(run: Path, twin: Path) -> None:
    """The same evaluations once each, and the same training."""
    assert of_sets(run) == of_sets(twin)
    assert curve(run) == curve(twin)
    assert weights(run, 12) == weights(twin, 12)


@pytest.mark.slow
def test_the_bits_of_an_evaluation_in_the_gang(gang: Path, text: str, cache: Path, tmp_path: Path) -> None:
    """Though one is killed and begins again. Rows and commits have them, and the summary has those of the last step.

    Asked for in torchtitan#4152.
    """
    run = tmp_path / "run"
    document = evaluated(text)
    document["checkpoint"] |= {"every": 6, "keep": 9}
    summary = drive_here(document, str(run), cache, gang=with_evaluator([ROOM]), faults=("kill@0:5e",))
    assert (summary["state"], summary["attempts"]) == (Outcome.DONE.value, 1)
    assert told(run, "failed") == ["the evaluation of step 5 failed: process ended with exit code -9"]
    assert [row["step"] for row in rows(run, "evals.jsonl")] == DUE
    same(run, gang)
    store = Store(str(run / "checkpoints"))
    assert store.steps() == [0, 5, 6, 10, 12]
    ours = {step: attached(store, store.manifest(step)) for step in store.steps()}
    assert {step: row and row["sets"] for step, row in ours.items() if row} == {
        row["step"]: row["sets"] for row in rows(run, "evals.jsonl")
    }
    assert summary["evaluation"]["sets"] == rows(run, "evals.jsonl")[-1]["sets"]
    assert summary["evaluated_beside"]["worker_hours"] > 0
    assert summary["ledger"]["seconds"]["evaluate"] < summary["ledger"]["wall_seconds"]
    assert not any("evaluations" in row for row in rows(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("mixtral-tiny", {"micro_batch": 2}),
        ("mixtral-tiny", {"ep": 2, "micro_batch": 2}),
        ("gpt-tiny", {"zero": 3, "micro_batch": 4}),
        ("gpt-tiny", {"pp": 2, "micro_batch": 2}),
    ],
    ids=str,
)
def test_other_models_and_layouts(
    model: str, parallel: dict[str, Any], text: str, cache: Path, tmp_path: Path
) -> None:
    def document(where: str) -> dict[str, Any]:
        found = evaluated(text, where, every=2)
        found["train"] |= {"steps": 4}
        found["workload"] = {"model": model}
        found["parallel"] = parallel
        return found

    drive_here(document("gang"), str(tmp_path / "gang"), cache)
    drive_here(document("beside"), str(tmp_path / "beside"), cache, gang=with_evaluator([ROOM]))
    assert [row["step"] for row in of_sets(tmp_path / "beside")] == [0, 2, 4]
    assert of_sets(tmp_path / "beside") == of_sets(tmp_path / "gang")
    assert curve(tmp_path / "beside") == curve(tmp_path / "gang")


@pytest.mark.slow
def test_a_rank_that_is_killed_meanwhile(
    gang: Path, text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for both, so the evaluation goes on; and where there is none, it begins again."""
    faults = ("slow@0:0e=0.1", "slow@1:1=0.1", "kill@1:7")
    for name, rooms, starts in (("room", [ROOM], 4), ("none", [ROOM, 2, ROOM], 5)):
        run = tmp_path / name
        make = with_evaluator(list(rooms))
        controller = controller_here(evaluated(text), str(run), cache, gang=make, faults=faults)
        halt, under_way, begun = controller._halt, list[Any](), list[Any]()
        start = lasting_gang("evaluator").start

        def halted(*given: Any, halt: Any = halt, seen: Any = under_way, by: Any = controller) -> None:
            seen.append(by._evaluations._step)
            halt(*given)

        def started(*given: Any, start: Any = start, seen: Any = begun, **named: Any) -> None:
            seen.append(given)
            start(*given, **named)

        monkeypatch.setattr(controller, "_halt", halted)
        monkeypatch.setattr(lasting_gang("evaluator"), "start", started)
        controller.drive()
        monkeypatch.undo()
        same(run, gang)
        assert under_way[0] is not None if name == "room" else len(under_way) == 2
        assert len(begun) == starts
        assert json.loads((run / "summary.json").read_text())["attempts"] == 2


class Killed(BaseException):
    """The controller's process is gone."""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["evaluates", "stored"])
def test_a_controller_that_is_killed_meanwhile(
    when: str, gang: Path, text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an evaluation, or when its row is stored and its commit does not have it yet.

    Asked for in ray#59270.
    """
    run = tmp_path / "run"

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if when == "stored":
            patch.setattr("orchestrator.controller.run_files.attach", die)
        else:
            patch.setattr(background_evaluation.BackgroundEvaluation, "look", die)
        with pytest.raises(Killed):
            drive_here(evaluated(text), str(run), cache, gang=with_evaluator([ROOM]))
    drive_here(evaluated(text), str(run), cache, gang=with_evaluator([ROOM]))
    same(run, gang)


@pytest.mark.slow
def test_without_room_it_waits_says_so_once_and_is_done_at_the_end(
    gang: Path, text: str, cache: Path, tmp_path: Path
) -> None:
    """Retention keeps what waits: only then is anything removed."""
    run = tmp_path / "run"
    document = evaluated(text, every=2)
    document["checkpoint"] |= {"keep": 1, "keep_best": "validation.loss"}
    seen = set[tuple[int, ...]]()
    controller = controller_here(document, str(run), cache, gang=with_evaluator([2]))
    advance = controller._advance

    def watch(history: Any) -> None:
        advance(history)
        seen.add(tuple(history.commits.store.steps()))

    controller._advance = watch  # type: ignore[method-assign]
    summary = controller.drive()
    assert summary["state"] == Outcome.DONE.value
    assert len(told(run, "there is no room for one more worker of 1 CPU")) == 1
    assert [row["step"] for row in rows(run, "evals.jsonl")] == [0, 2, 4, 6, 8, 10, 12]
    assert (0, 2, 4, 6, 8, 10, 12) in seen
    losses = {row["step"]: row["validation"]["loss"] for row in of_sets(run)}
    best = min(losses, key=losses.__getitem__)
    assert Store(str(run / "checkpoints")).steps() == sorted({best, 12})
    assert curve(run) == curve(gang)
    assert [e["phase"] for e in rows(run, "events.jsonl")][-3:] == ["stop", "evaluate", "done"]


@pytest.mark.slow
def test_a_stop_waits_for_nothing_and_the_resumed_run_makes_up_for_it(
    gang: Path, text: str, cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    controller = controller_here(
        evaluated(text), str(run), cache, gang=with_evaluator([ROOM]), faults=("slow@0:5e=60",), until=7
    )
    assert controller.drive()["state"] == Outcome.STOPPED.value
    assert not (run / "evals.jsonl").exists() or 5 not in [row["step"] for row in rows(run, "evals.jsonl")]
    drive_here(evaluated(text), str(run), cache, gang=with_evaluator([ROOM]))
    same(run, gang)


@pytest.mark.slow
def test_a_run_without_evaluations_has_the_same_bits(
    gang: Path, text: str, cache: Path, tmp_path: Path
) -> None:
    run, document = tmp_path / "run", evaluated(text)
    del document["evaluate"]
    drive_here(document, str(run), cache, gang=lambda: LocalGang([2]))
    assert curve(run) == curve(gang)
    assert weights(run, 12) == weights(gang, 12)


@pytest.mark.slow
def test_an_evaluator_that_is_frozen_is_replaced(
    gang: Path, text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_evaluation, "SILENCE", 3.0)
    run = tmp_path / "run"
    drive_here(evaluated(text), str(run), cache, gang=with_evaluator([ROOM]), faults=("stop@0:5e",))
    same(run, gang)
    assert told(run, "failed") == ["the evaluation of step 5 failed: no sign of life for 3 s"]


@pytest.mark.slow
def test_a_commit_that_was_damaged_while_it_waited_has_no_evaluation(
    gang: Path, text: str, cache: Path, tmp_path: Path
) -> None:
    """It is told, and holds up neither the others nor the end of the run."""
    run, document = tmp_path / "run", evaluated(text)
    document["checkpoint"]["keep"] = 9
    controller = controller_here(document, str(run), cache, gang=with_evaluator([2]))
    halt = controller._halt

    def damage(*given: Any, **keywords: Any) -> None:
        (shard, *_) = (run / "checkpoints/step-00000005").glob("shard-*")
        shard.write_bytes(shard.read_bytes()[:-64] + bytes(64))
        halt(*given, **keywords)

    controller._halt = damage  # type: ignore[method-assign]
    assert controller.drive()["state"] == Outcome.DONE.value
    assert of_sets(run) == [row for row in of_sets(gang) if row["step"] != 5]
    (line,) = told(run, "failed")
    assert line.startswith("the evaluation of step 5 failed: CorruptCommit: step 5: ")
    assert line.endswith("; it stays without one")

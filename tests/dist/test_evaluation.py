"""Runs that evaluate held-out text: the same numbers under any layout and through faults, and training unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, controller_here, drive_here
from prepared import prepare_sets_here

from cluster.workers.gang import GangStatus
from cluster.workers.worker_context import Work
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.controller.controller import Controller
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.observe.formatting import work_text
from orchestrator.storage.run_directory import RunDir

TOLERANCE = 1e-6
MODELS = {"mixtral-tiny": "causal_lm", "bert-tiny": "masked_lm", "t5-tiny": "span_corruption"}
LAYOUTS: list[dict[str, Any]] = [
    {"zero": 1, "micro_batch": 2},
    {"zero": 3, "micro_batch": 4},
    {"tp": 2},
    {"tp": 2, "sequence": True},
    {"cp": 2},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "zbv"},
    {"engine": "deepspeed", "zero": 2, "micro_batch": 2},
    {"micro_batch": 2},
    {"pp": 2, "schedule": "interleaved"},
]
"""Each of the models is evaluated under the first eight of these that are legal; a GPT under eight much alike."""
ILLEGAL = {"bert-tiny": {"cp"}, "t5-tiny": {"cp", "sequence"}}


def evaluated(text: str, **evaluate: Any) -> dict[str, Any]:
    """A job that holds out a third of its documents, some of 7 global batches, which no width divides."""
    document = job(text)
    document["data"]["validation"] = {"share": 0.34}
    document["evaluate"] = {"every": 5, "at_start": True, **evaluate}
    return document


def of_sets(run: Path) -> list[dict[str, Any]]:
    """Step and metrics of each evaluation in evals.jsonl."""
    return [{"step": row["step"], **row["sets"]} for row in rows(run, "evals.jsonl")]


def close(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for name, metrics in theirs.items():
            assert ours[name] == pytest.approx(metrics, rel=TOLERANCE), (ours["step"], name)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def quiet(text: str, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one worker, undisturbed."""
    run = tmp_path_factory.mktemp("runs") / "quiet"
    drive_here(evaluated(text), str(run), cache, gang=lambda: LocalGang([1]))
    return run


def test_evaluations_are_rows_of_their_own(quiet: Path, text: str, cache: Path, tmp_path: Path) -> None:
    """At the start, every five steps and at the end; over all held-out tokens, and the training is as without."""
    found = of_sets(quiet)
    assert [row["step"] for row in found] == [0, 5, 10, 12]
    assert all(row.keys() == {"step", "validation"} for row in found)
    first, last = found[0]["validation"], found[-1]["validation"]
    assert first.keys() == {"loss", "perplexity", "bits_per_byte", "accuracy", "tokens"}
    assert first["tokens"] == last["tokens"] > 5 * 8 * 32
    assert last["loss"] < first["loss"] - 0.3
    assert 0 < first["accuracy"] < last["accuracy"] < 1
    row = rows(quiet)[0]
    assert row["evaluation_seconds"] >= sum(e["seconds"] for e in row["evaluations"]) > 0
    document = evaluated(text)
    del document["evaluate"]
    drive_here(document, str(tmp_path / "without"), cache, gang=lambda: LocalGang([1]))
    assert curve(quiet) == curve(tmp_path / "without")
    assert weights(quiet, 12) == weights(tmp_path / "without", 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"micro_batch": 3},
        {"micro_batch": 2, "zero": 3},
        {"tp": 2},
        {"pp": 2, "schedule": "zbv"},
        {"cp": 2},
        {"engine": "deepspeed", "zero": 2, "micro_batch": 2},
        {"pp": 2, "schedule": "1f1b", "micro_batch": 4},
        {"pp": 2, "schedule": "interleaved"},
    ],
    ids=str,
)
def test_every_layout_gives_the_same_numbers(
    parallel: dict[str, Any], quiet: Path, text: str, cache: Path, tmp_path: Path
) -> None:
    """Asked for in torchtitan#1210."""
    document = evaluated(text)
    document["parallel"] = parallel
    if parallel == {"micro_batch": 3}:
        document["train"]["global_batch"] = 6  # other training: only the start is comparable
    elif "schedule" in parallel:
        document["workload"]["changes"]["layers"] = 4
    alone = dict(document, parallel={"micro_batch": 1})
    run, reference = tmp_path / "run", quiet
    if document != evaluated(text) | {"parallel": parallel}:
        reference = tmp_path / "reference"
        drive_here(alone, str(reference), cache, gang=lambda: LocalGang([1]))
    drive_here(
        document, str(run), cache, gang=lambda: LocalGang([1 if parallel == {"micro_batch": 3} else 2])
    )
    close(of_sets(run), of_sets(reference))


@pytest.mark.parametrize(
    ("model", "objective", "parallel"),
    [
        pytest.param("mixtral-tiny", "causal_lm", {"ep": 2, "micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param("switch-tiny", "span_corruption", {"ep": 2, "micro_batch": 2}, marks=pytest.mark.slow),
        *(
            pytest.param(model, objective, parallel, marks=pytest.mark.slow)
            for model, objective in MODELS.items()
            for parallel in [way for way in LAYOUTS if not way.keys() & ILLEGAL.get(model, set())][:8]
        ),
    ],
    ids=str,
)
def test_every_model_gives_the_same_numbers(
    model: str, objective: str, parallel: dict[str, Any], text: str, cache: Path, tmp_path: Path
) -> None:
    """Routers too, which a rank's padding of a pass must not reach; objectives that draw masks draw the same."""

    def document(given: dict[str, Any]) -> dict[str, Any]:
        found = evaluated(text, every=2)
        found["train"] |= {"steps": 4, "optimizer": {"lr": 1e-3, "eps": 1e-4}}
        found["workload"] = {"model": model, "objective": objective}
        if parallel.get("schedule") in ("zbv", "interleaved"):
            found["workload"]["changes"] = {"layers": 4}
        found["parallel"] = given
        return found

    alone, run = tmp_path / "alone", tmp_path / "run"
    drive_here(document({"micro_batch": 1}), str(alone), cache, gang=lambda: LocalGang([1]))
    drive_here(document(parallel), str(run), cache)
    close(of_sets(run), of_sets(alone))
    if model in ("mixtral-tiny", "switch-tiny"):
        assert of_sets(run)[0]["validation"]["router_load"] >= 1


@pytest.mark.slow
def test_faults_in_an_evaluation_and_widths_change_no_bit(
    text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bitwise mode: killed within the second evaluation, then one worker, then killed after a commit, then two."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)

    def bitwise() -> dict[str, Any]:
        document = evaluated(text)
        document["train"] |= {"determinism": "bitwise", "virtual_shards": 4}
        document["parallel"] = {"micro_batch": 2}
        document["checkpoint"] |= {"every": 2, "average": {"ema": 0.9}}
        return document

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    drive_here(bitwise(), str(alone), cache, gang=lambda: LocalGang([1]))
    faults = ("slow@0:4=2", "kill@1:5e", "kill@0:11/2")  # the pause lets the commit at step 2 be published
    drive_here(bitwise(), str(killed), cache, gang=lambda: LocalGang([2, 1, 2]), faults=faults)
    assert [row["attempt"] for row in rows(killed, "evals.jsonl")][:2] == [1, 2]
    assert of_sets(killed) == of_sets(alone)
    assert curve(killed) == curve(alone)
    assert weights(killed, 12) == weights(alone, 12)


@pytest.mark.slow
def test_a_run_that_gains_nothing_ends_early_with_its_best_commit(tmp_path: Path, cache: Path) -> None:
    """Little text, often read: the loss on what is held out rises while that of training falls."""
    text = write_text(tmp_path, 30_000)

    def overfitted() -> dict[str, Any]:
        document = evaluated(text, every=4, at_start=False)
        document["train"] |= {"steps": 400, "optimizer": {"lr": 3e-2, "schedule": "constant"}}
        document["stop_when"] = {"metric": "validation.loss", "patience": 3}
        document["checkpoint"] |= {"keep": 1, "keep_best": "validation.loss"}
        return document

    run, killed = tmp_path / "run", tmp_path / "killed"
    summary = drive_here(overfitted(), str(run), cache)
    assert summary["state"] == Outcome.DONE.value
    assert summary["reason"] == "validation.loss has not improved in 3 evaluations"
    losses = {row["step"]: row["validation"]["loss"] for row in of_sets(run)}
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 12 < 400
    assert Store(str(run / "checkpoints")).steps() == [best, best + 12]
    assert rows(run)[-1]["loss"] < rows(run)[best - 1]["loss"]
    # The same command again has nothing to do; a fault on the way changes nothing.
    again = drive_here(overfitted(), str(run), cache)
    assert (again["state"], again["step"]) == (Outcome.DONE.value, best + 12)
    drive_here(overfitted(), str(killed), cache, faults=(f"kill@1:{best + 8}e",))
    assert of_sets(killed) == of_sets(run)


class StoppedInEvaluation(LocalGang):
    """A gang whose run is stopped once one batch of an evaluation after that step was computed."""

    def __init__(self, step: int, stop: Callable[[], object]) -> None:
        super().__init__([1])
        self._step, self._stop, self._batches = step, stop, 0
        self.work: Work | None = None

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        found = super().poll(saved, wait)
        for rank in found.ranks:
            if rank.evaluated_batches > self._batches and max(rank.step, 0) == max(self._step - 1, 0):
                self.work = rank.work
                self._stop()
            self._batches = rank.evaluated_batches
        return found


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_stop_does_not_wait_for_an_evaluation_which_is_made_up_for(
    step: int, text: str, cache: Path, tmp_path: Path, quiet: Path
) -> None:
    run, controllers = tmp_path / "stopped", list[Controller]()
    gang = StoppedInEvaluation(step, lambda: controllers[0].request_stop("enough"))
    slow = (f"slow@0:{step}e=3",)
    controllers.append(controller_here(evaluated(text), str(run), cache, gang=lambda: gang, faults=slow))
    summary = controllers[0].drive()
    assert (summary["state"], summary["step"]) == (Outcome.STOPPED.value, step)
    assert gang.work is not None
    assert work_text(gang.work).startswith(f"evaluation of validation after step {step}: 1 of ")
    assert step == 0 or [row["step"] for row in of_sets(run)] == [0]  # the other was cut short
    drive_here(evaluated(text), str(run), cache, gang=lambda: LocalGang([1]))
    assert of_sets(run) == of_sets(quiet)
    assert curve(run) == curve(quiet)


def test_a_commit_is_evaluated_afterwards_with_the_same_numbers(
    quiet: Path, text: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, whatever the run's layout was; text of its own is one more set. It says how far it is."""
    own = write_text(tmp_path / "own", 9_000)
    document = evaluated(text, sets={"own": {"sources": [{"uri": own}]}})
    document["data"]["cache"] = str(cache)
    spec, run = parse(document), RunDir(str(quiet))
    commit = Store(run.at("checkpoints")).manifest(12)
    sets = prepare_sets_here(spec, str(cache), commit.meta["data"])
    row = evaluate_commit(spec, run, commit, sets)
    assert "evaluation of validation after step 12: " in capsys.readouterr().err
    assert (row["step"], row["sets"]["validation"]) == (12, of_sets(quiet)[-1]["validation"])
    assert row["sets"]["own"]["tokens"] > 1000

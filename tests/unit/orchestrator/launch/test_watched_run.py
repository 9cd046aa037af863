"""What is checked before anything starts, and what a command makes of a run's end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import changed, job, write_text

from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import dump, parse
from orchestrator.launch import start_run
from orchestrator.launch import watched_run as runs
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.watched_run import RunOutcome, _outcome
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return job(write_text(tmp_path / "corpus", 20_000))


# -- before


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        ("gpt-tiny", "causal_lm"), ("llama-tiny", "causal_lm"), ("bert-tiny", "masked_lm"),
        ("bert-tiny", "whole_word_masking"), ("bert-tiny", "next_sentence"), ("t5-tiny", "span_corruption"),
        ("bart-tiny", "denoising"), ("electra-tiny", "replaced_token_detection"), ("glm-tiny", "blank_infilling"),
    ],
)  # fmt: skip
def test_a_job_that_can_run_passes(document: dict[str, Any], model: str, objective: str) -> None:
    document["workload"] = {"model": model, "objective": objective}
    check_job(parse(document))


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"data": {"sequence_length": 100_000}}, "data.sources: the corpus has 200"),
        ({"data": {"sequence_length": 1024}}, "workload: sequence_length 1024 exceeds"),
        (
            {"data": {"tokenizer": "/nowhere.json"}},
            "data.tokenizer /nowhere.json: there is no tokenizer.json",
        ),
        ({"workload": {"model": "gpt-tinny"}}, "workload: unknown model 'gpt-tinny'"),
        ({"workload": {"objective": "masked_lm"}}, "workload.objective: masked_lm does not train gpt-tiny"),
        ({"workload": {"options": {"rate": 1}}}, "workload: causal_lm has no option rate"),
        ({"workload": {"changes": {"hidden": 30}}}, "workload: hidden 30 is not a multiple of heads"),
        ({"parallel": {"tp": 3}}, "parallel: tp 3 does not divide"),
    ],
)
def test_what_cannot_run_is_refused(document: dict[str, Any], parts: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError) as found:
        check_job(changed({**document, "parallel": {}}, **parts))
    assert str(found.value).startswith(wanted)


def test_memory_is_left_to_the_cluster(document: dict[str, Any]) -> None:
    """The machine of the command is seldom the machine of the workers."""
    check_job(changed(document, workload={"changes": {"hidden": 8192, "layers": 100}}))


# -- the same run


def test_a_fresh_directory_is_of_no_other_run(document: dict[str, Any], run_dir: RunDir) -> None:
    check_same_run(parse(document).run_identity, run_dir)


@pytest.mark.parametrize(
    "parts",
    [
        {}, {"resources": {"workers": 1}}, {"checkpoint": {"every": 7}}, {"data": {"cache": "/elsewhere"}},
        {"workload": {"objective": "causal_lm"}},
    ],
)  # fmt: skip
def test_where_and_how_it_runs_may_change(
    document: dict[str, Any], run_dir: RunDir, parts: dict[str, Any]
) -> None:
    run_dir.write_text("job.yaml", dump(parse(document)))
    check_same_run(changed(document, **parts).run_identity, run_dir)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"seed": 4}, "seed is 3 in this run and 4 in the job file"),
        ({"train": {"global_batch": 16}}, "train.global_batch is 8 in this run and 16 in the job file"),
        ({"data": {"sequence_length": 64}, "seed": 4}, "data.sequence_length is 32 in this run and 64"),
        ({"workload": {"changes": {"hidden": 32}}}, "workload.changes.heads is 4 in this run and not set"),
        ({"data": {"tokenizer": "a.json"}}, "data.tokenizer is {'train_bpe': 512} in this run and 'a.json'"),
    ],
)
def test_what_is_trained_may_not(
    document: dict[str, Any], run_dir: RunDir, parts: dict[str, Any], wanted: str
) -> None:
    run_dir.write_text("job.yaml", dump(parse(document)))
    with pytest.raises(InputError) as found:
        check_same_run(changed(document, **parts).run_identity, run_dir)
    assert str(found.value).startswith(f"{run_dir.uri}: {wanted}")
    assert "a run stays the same run" in str(found.value)


# -- the end


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_the_end_of_a_run_is_the_end_of_the_command(state: str) -> None:
    summary = {"state": state, "reason": "why", "commit": 3}
    assert _outcome({"summary": summary, "error": None}) == RunOutcome(Outcome(state), summary, "why")


def test_a_stop_before_the_first_commit_is_no_stop_with_a_commit_in_place() -> None:
    ended = _outcome({"summary": {"state": "stopped", "reason": "why", "commit": None}, "error": None})
    assert ended.outcome == Outcome.FAILED
    assert ended.line == "why; no checkpoint yet; the same command starts from the beginning"


@pytest.mark.parametrize(("commit", "outcome"), [(4, Outcome.STOPPED), (None, Outcome.FAILED)])
def test_a_summary_of_a_controller_that_is_gone_is_read_the_same(
    run_dir: RunDir, commit: int | None, outcome: Outcome
) -> None:
    watched = runs.WatchedRun(None, run_dir)
    summary = {"state": "stopped", "reason": "why", "commit": commit, "ended": time.time() + 1}
    run_dir.write_json("summary.json", summary)
    ended = watched._outcome_on_disk()
    assert ended is not None
    assert ended.outcome == outcome


def test_a_controller_that_answers_late_may_still_write_the_report(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first summary stands on disk before the report does, and Ray must live until the report is written."""
    import ray
    from ray.exceptions import GetTimeoutError

    def get(request: Any, timeout: float) -> Any:
        raise GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    run = runs.WatchedRun(SimpleNamespace(status=SimpleNamespace(remote=lambda: None)), run_dir)
    summary = {"state": "done", "reason": "why", "commit": 4, "ended": time.time() + 1}
    run_dir.write_json("summary.json", summary)
    assert run.look() is None
    run_dir.write_json("summary.json", summary | {"tracking": {}})
    assert run.look() == RunOutcome(Outcome.DONE, summary | {"tracking": {}}, "why")
    run_dir.write_json("summary.json", summary)
    run._answered_at -= runs.SILENCE
    assert run.look() == RunOutcome(Outcome.DONE, summary, "why")


class Scripted:
    """A run that is looked at: each look answers as `looks` says, which may raise, and the last one again and again."""

    def __init__(self, *looks: Callable[[Scripted], RunOutcome | None], **status: Any) -> None:
        self.status, self.stopping, self.left = status, False, False
        self.wrong: Exception | None = None
        self._looks = list(looks)

    def look(self) -> RunOutcome | None:
        return (self._looks.pop(0) if len(self._looks) > 1 else self._looks[0])(self)

    def leave(self) -> None:
        self.left = True


def goes_on(_: Scripted) -> None:
    return None


def is_interrupted(_: Scripted) -> None:
    raise KeyboardInterrupt


def stops(run: Scripted, commit: int | None = 4) -> RunOutcome | None:
    summary = {"state": "stopped", "reason": "why", "commit": commit}
    return _outcome({"error": None, "summary": summary}) if run.stopping else None


def watched(run: Scripted, show: Callable[[dict[str, Any]], None] = lambda status: None) -> RunOutcome:
    return runs.watch(lambda: run, show)  # type: ignore[arg-type, return-value]


@pytest.fixture
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.workers.ray_internals.dead_main_process", lambda: "")
    monkeypatch.setattr(runs, "REFRESH", 0.0)


@pytest.mark.usefixtures("_no_ray")
def test_a_stop_before_the_first_commit_is_an_interruption() -> None:
    with pytest.raises(KeyboardInterrupt):
        watched(Scripted(is_interrupted, lambda run: stops(run, None)))
    assert watched(Scripted(is_interrupted, stops)).outcome == Outcome.STOPPED


@pytest.mark.usefixtures("_no_ray")
def test_an_interruption_while_the_controller_is_asked_for_is_a_stop_that_is_watched() -> None:
    """It goes on without the command that has asked for it."""

    def begin() -> Scripted:
        os.kill(os.getpid(), signal.SIGINT)
        asked.append(run)
        return run

    asked: list[Scripted] = []
    shown: list[dict[str, Any]] = []
    run = Scripted(goes_on, stops)
    assert runs.watch(begin, shown.append).outcome == Outcome.STOPPED  # type: ignore[arg-type]
    assert (asked, run.left) == ([run], False)
    assert shown[0] == {"phase": "connect", "note": runs.STOPPING}


@pytest.mark.usefixtures("_no_ray")
def test_an_interruption_where_no_controller_was_asked_for_ends_the_command() -> None:
    def begin() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.watch(begin, lambda status: None)


@pytest.mark.usefixtures("_no_ray")
def test_a_second_interruption_leaves_no_run_that_has_not_heard_of_the_stop() -> None:
    run = Scripted(is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        watched(run)
    assert run.left


@pytest.mark.usefixtures("_no_ray")
def test_a_run_that_is_asked_to_stop_still_says_what_holds_it_up() -> None:
    shown: list[str] = []
    run = Scripted(is_interrupted, stops, note="saving pauses: the disk is full")
    watched(run, lambda status: shown.append(status["note"]))
    assert shown == [f"{runs.STOPPING}; saving pauses: the disk is full"]


@pytest.mark.usefixtures("_no_ray")
def test_what_a_callers_function_raises_ends_the_run_with_a_commit() -> None:
    def show(status: dict[str, Any]) -> None:
        shown.append(status["step"])
        raise ValueError("the caller's own")

    shown: list[int] = []
    run = Scripted(goes_on, goes_on, stops, step=3)
    with pytest.raises(ValueError, match="the caller's own"):
        watched(run, show)
    assert (shown, run.stopping) == ([3], True)


@pytest.mark.parametrize(("input_", "outcome"), [(True, Outcome.WRONG_INPUT), (False, Outcome.FAILED)])
def test_a_controller_s_error_is_the_command_s(input_: bool, outcome: Outcome) -> None:
    status = {"summary": None, "error": {"line": "is wrong", "input": input_}}
    assert _outcome(status) == RunOutcome(outcome, None, "is wrong")


def test_a_finished_run_is_not_run_again(document: dict[str, Any], run_dir: RunDir) -> None:
    run_dir.write_text("job.yaml", dump(parse(document)))
    run_dir.write_json("summary.json", {"state": "done", "reason": "12 steps are done"})
    ended = start_run.run(parse(document), run_dir, None, None, lambda status: pytest.fail("something runs"))
    assert (ended.outcome, ended.line) == (Outcome.DONE, f"{run_dir.uri} is finished: nothing to do")
    more = changed(document, evaluate={"samples": {"prompts": ["a"]}}, sinks={"tensorboard": True})
    line = start_run.run(more, run_dir, None, None, lambda status: None).line
    assert line.startswith(
        f"{run_dir.uri} is finished: nothing to do; changes of evaluate, sinks in the job file have"
    )
    with pytest.raises(InputError, match="seed is 3"):
        start_run.run(changed(document, seed=4), run_dir, None, None, lambda status: None)


def test_wrong_words_leave_no_directory(document: dict[str, Any], tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path / "new" / "small"))
    with pytest.raises(InputError, match=r"--until: step 13 is beyond train\.steps 12"):
        start_run.run(parse(document), run_dir, 13, None, lambda status: None)
    assert not (tmp_path / "new").exists()


def test_a_run_is_not_begun_in_the_folder_of_a_search(document: dict[str, Any], run_dir: RunDir) -> None:
    run_dir.append("trials.jsonl", [{"trial": "0000", "event": "begun", "time": 1.0}])
    with pytest.raises(
        InputError, match=f"is the folder of a search; .* --run-dir {run_dir.uri}-run; or use tune"
    ):
        start_run.run(parse(document), run_dir, None, None, lambda status: None)
    assert run_dir.rows("events.jsonl") == []


def test_the_line_of_a_run_that_failed_has_no_secret() -> None:
    line = "http://ann:SECRET@host/a.txt: cannot be read"
    error = {"line": line, "input": True}
    assert _outcome({"error": error, "summary": None}).line == line.replace("SECRET", "***")

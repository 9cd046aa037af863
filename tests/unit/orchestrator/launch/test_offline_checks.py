"""A job is checked for machines that are not here: planned without its text and its tokenizer, and submitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import job as small_job
from run_directories import run_of

from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.launch.offline_checks import check_on_paper
from orchestrator.launch.preflight import preflight
from orchestrator.launch.submitted_job import SubmittedJob
from orchestrator.storage.run_directory import RunDir
from workloads.model.presets import PRESETS


def job(model: str = "gpt2", **data: Any) -> JobSpec:
    document = {
        "name": "paper",
        "workload": {"model": model},
        "data": {
            "sources": [{"uri": "nowhere/*.txt"}],
            "tokenizer": "nowhere",
            "sequence_length": 64,
            **data,
        },
        "train": {"steps": 10, "global_batch": 8},
    }
    return parse(document)


def test_a_missing_tokenizer_is_taken_to_have_the_tokens_of_the_model() -> None:
    found, assumed = check_on_paper(job())
    assert found.shape.vocabulary == PRESETS["gpt2"].vocab_size
    assert assumed == ["the tokenizer nowhere is not here, and taken to have the 50,257 tokens of gpt2"]
    more, _ = check_on_paper(job(add_tokens=["<a>", "<b>"]))
    assert more.shape.vocabulary == PRESETS["gpt2"].vocab_size + 2


def test_what_the_job_says_of_its_tokenizer_is_not_assumed() -> None:
    found, assumed = check_on_paper(job(tokenizer={"train_bpe": 512}))
    assert (found.shape.vocabulary, assumed) == (512, [])


def test_a_tokenizer_that_is_there_and_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        check_on_paper(job(tokenizer=str(tmp_path)))


def test_an_own_model_needs_to_be_told_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\nclass Model(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="train_bpe: N"):
        check_on_paper(job("mine:Model"))


def test_what_is_wrong_wherever_it_runs_is_told_together() -> None:
    spec = job("bert-base", labels=["a", "b"])
    with pytest.raises(InputError) as refused:
        check_on_paper(spec)
    told = [str(each) for each in refused.value.each()]
    assert len(told) == 2
    assert any("does not train bert-base" in line for line in told)
    assert any("predicts no labels" in line for line in told)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job of which this machine has everything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text of some words\n" * 40)
    (tmp_path / "mine.py").write_text("def flat(step: int, steps: int) -> float:\n    return 1.0\n")
    document = small_job(str(tmp_path / "text.txt"))
    document["resources"]["workers"] = {"min": 2, "max": 2}
    return document


def with_keys(document: dict[str, Any], keys: dict[str, str]) -> JobSpec:
    for key, value in keys.items():
        override(document, f"{key}={value}")
    return parse(document)


def refused(check: Callable[[], object]) -> list[str]:
    with pytest.raises(InputError) as error:
        check()
    return [str(each) for each in error.value.each()]


ELSEWHERE: list[dict[str, str]] = [
    {"data.sources": "[{uri: '/nowhere/*.txt'}]"},
    {"data.sources": "[{uri: 's3://nowhere/*.txt'}]"},
    {"data.sources": "[{uri: '/nowhere/files.list'}]"},
    {"data.tokenizer": "/nowhere/tokenizer.json"},
    {"data.tokenizer": "s3://nowhere/tokenizer.json"},
    {"data.cache": "s3://nowhere/cache"},
    {"data.clean": "[{own: {function: 'nowhere:clean'}}]"},
    {"workload.model": "hf:/nowhere/model", "workload.changes": "{}"},
    {"workload.init_from": "/nowhere/run@5"},
    {"train.continue_from": "/nowhere/run"},
    {"train.optimizer.name": "nowhere:Optimizer"},
    {"evaluate.every": "4", "evaluate.tasks": "[/nowhere/task.yaml]"},
    {"limits.prices": "/nowhere/prices.csv", "limits.cost_usd": "5"},
    {"checkpoint.export": "hf", "checkpoint.export_to": "s3://nowhere/export"},
]


@pytest.mark.parametrize("keys", ELSEWHERE, ids=lambda keys: next(iter(keys.items()))[1])
def test_what_only_the_cluster_may_have_is_left_to_the_run(
    here: dict[str, Any], keys: dict[str, str]
) -> None:
    SubmittedJob(with_keys(here, keys)).check(RunDir("/nowhere/runs/small"), 6)
    SubmittedJob(with_keys(here, keys)).check(RunDir("s3://nowhere/runs/small"), 6)


WRONG: list[tuple[dict[str, str], str]] = [
    ({"data.sources.0.field": "[en, de]"}, "a text file cannot hold pairs"),
    ({"workload.objective": "masked_lm"}, "does not train gpt-tiny"),
    ({"parallel": "{tp: 3}"}, "heads"),
    ({"train.freeze": "[layers.9.*]"}, "layers.9"),
    ({"train.optimizer.schedule": "mine:steep"}, "mine has no steep"),
    ({"checkpoint.export_to": ".", "checkpoint.export": "hf"}, "holds something other than an export"),
]


@pytest.mark.parametrize(("keys", "what"), WRONG, ids=[what for _, what in WRONG])
def test_what_its_run_refuses_is_refused_in_the_same_words(
    here: dict[str, Any], keys: dict[str, str], what: str
) -> None:
    spec = with_keys(here, keys)
    run = RunDir(str(Path.cwd() / "runs" / "small"))
    told = refused(lambda: SubmittedJob(spec).check(run, None))
    assert told == refused(lambda: preflight(spec, run, None, None))
    assert any(what in line for line in told), told


def test_what_needs_no_text_is_refused_where_the_text_is_missing(here: dict[str, Any]) -> None:
    keys = {
        "data.sources": "[{uri: '/nowhere/*.txt'}]",
        "parallel": "{tp: 3}",
        "train.freeze": "[layers.9.*]",
    }
    told = refused(lambda: SubmittedJob(with_keys(here, keys)).check(RunDir("/nowhere/run"), 99))
    assert any("99" in line for line in told)
    assert len(told) == 2


def test_another_run_and_a_folder_of_something_else_are_refused(here: dict[str, Any], tmp_path: Path) -> None:
    spec = parse(here)
    run = run_of(tmp_path / "runs" / "small", phase="stopped")
    run.write_text("job.yaml", dump(spec.with_parts(seed=spec.seed + 1)))
    assert (
        "seed is 4 in this run and 3 in the job file"
        in refused(lambda: SubmittedJob(spec).check(run, None))[0]
    )
    # Its own code is on the cluster alone.
    other = with_keys(here, {"train.optimizer.name": "nowhere:Optimizer"})
    assert "seed is 4 in this run" in refused(lambda: SubmittedJob(other).check(run, None))[0]
    run.write_text("job.yaml", dump(spec))
    SubmittedJob(spec).check(run, None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    told = refused(lambda: SubmittedJob(spec).check(RunDir(str(tmp_path / "mine")), None))
    assert "is not a run directory" in told[0]

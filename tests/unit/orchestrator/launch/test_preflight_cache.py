"""A job that has run to an end is known, and no other is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch import job_checks, preflight_cache
from orchestrator.storage.run_directory import RunDir


def is_known(spec: JobSpec, run: RunDir) -> bool:
    return preflight_cache.is_known(preflight_cache.mark_of(spec, run))


def note(spec: JobSpec, run: RunDir) -> None:
    preflight_cache.note(preflight_cache.mark_of(spec, run))


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return job(write_text(tmp_path, 20_000))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory beside which data was prepared."""
    (tmp_path / "runs" / "_data").mkdir(parents=True)
    return RunDir(str(tmp_path / "runs" / "one"))


def test_a_job_is_known_once_it_has_run(document: dict[str, Any], run: RunDir, tmp_path: Path) -> None:
    spec = parse(document)
    assert not is_known(spec, run)
    note(spec, run)
    assert is_known(spec, run)
    assert is_known(spec, RunDir(str(tmp_path / "runs" / "two")))
    assert not is_known(spec, RunDir(str(tmp_path / "elsewhere" / "one")))
    other = parse(document | {"workload": document["workload"] | {"dropout": 0.25}})
    assert not is_known(other, run)


def test_changed_code_and_a_changed_tokenizer_are_checked_again(
    document: dict[str, Any], run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, tokenizer = tmp_path / "code.py", tmp_path / "tokenizer.json"
    code.touch()
    tokenizer.touch()
    monkeypatch.setattr(preflight_cache, "_code", lambda: [code])
    document["data"]["tokenizer"] = str(tokenizer)
    spec = parse(document)
    for file in (code, tokenizer):
        note(spec, run)
        assert is_known(spec, run)
        os.utime(file, (1, 1))
        assert not is_known(spec, run)
    tokenizer.unlink()
    assert not is_known(spec, run)


@pytest.mark.parametrize(
    "changed",
    [
        {"workload": {"model": "hf:somewhere", "objective": "causal_lm"}},
        {"workload": {"model": "mine:Model", "objective": "causal_lm"}},
        {"checkpoint": {"every": 4, "export": "gguf"}},
    ],
    ids=str,
)
def test_where_others_have_a_say_it_is_checked_each_time(
    changed: dict[str, Any], document: dict[str, Any], run: RunDir
) -> None:
    spec = parse(document | changed)
    note(spec, run)
    assert not is_known(spec, run)


def test_nothing_is_written_where_no_data_is(document: dict[str, Any], tmp_path: Path) -> None:
    note(parse(document), RunDir(str(tmp_path / "runs" / "one")))
    assert not (tmp_path / "runs").exists()


def test_of_a_known_job_the_model_alone_is_not_asked(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("asked", "workload.model")

    monkeypatch.setattr(job_checks, "check_workload", refuse)
    job_checks.check_job(parse(document), is_known=True)
    with pytest.raises(InputError, match="asked"):
        job_checks.check_job(parse(document))
    document["data"]["sources"] = [{"uri": "nowhere.txt"}]
    with pytest.raises(InputError, match=r"nowhere\.txt"):
        job_checks.check_job(parse(document), is_known=True)

"""init, schema, doctor, plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_job, write_text

from orchestrator.job import spec
from orchestrator.launch.doctor import Finding


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_job_that_is_whole(command: Any, folder: Path) -> None:
    said = command("init", "mine.yaml", "--text", "books/*.txt")
    assert (said.code, said.err) == (0, "")
    assert "orchestrator plan mine.yaml" in said.out
    written = spec.load(folder / "mine.yaml")
    assert (written.name, written.data.sources[0].uri) == ("mine", "books/*.txt")
    assert command("init", "other.yaml", "--name", "run-7").code == 0
    assert spec.load(folder / "other.yaml").name == "run-7"


@pytest.mark.parametrize(("words", "wrong"), [(["a b.yaml"], "a b"), (["a.yaml", "--name", "a: b"], "a: b")])
def test_init_writes_no_job_that_is_wrong(command: Any, folder: Path, words: list[str], wrong: str) -> None:
    said = command("init", *words)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert wrong in said.err
    assert list(folder.iterdir()) == []


def test_init_quotes_the_text(command: Any, folder: Path) -> None:
    assert command("init", "a.yaml", "--text", 'the "best" {books}/*.txt').code == 0
    assert spec.load(folder / "a.yaml").data.sources[0].uri == 'the "best" {books}/*.txt'


def test_schema_is_what_the_job_file_is(command: Any) -> None:
    said = command("schema")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == json.loads(spec.schema())


def test_a_plan_is_shown(command: Any, folder: Path) -> None:
    write_job(folder, job(write_text(folder, 20_000)))
    said = command("plan", "job.yaml")
    assert (said.code, said.err) == (0, "")
    assert "dp2 zero0" in said.out
    assert "chosen" in said.out
    assert "memory a rank" in said.out


@pytest.mark.parametrize(("words", "width"), [([], 2), (["--workers", "1"], 1)])
def test_a_plan_as_json(command: Any, folder: Path, words: list[str], width: int) -> None:
    write_job(folder, job(write_text(folder, 20_000)))
    said = command("plan", "job.yaml", "--json", *words)
    assert said.code == 0
    assert json.loads(said.out)["chosen"]["dp"] == width


def test_a_plan_checks_what_a_run_checks_and_tells_all_of_it(command: Any, folder: Path) -> None:
    asked = job("nowhere.txt")
    asked["resources"]["per_worker"] = {"labels": {"zone": "a"}}
    asked["workload"]["objective"] = "masked_lm"
    asked["checkpoint"] = {**asked.get("checkpoint", {}), "export_to": str(folder)}
    (folder / "mine.txt").write_text("mine")
    write_job(folder, asked)
    for words in (["plan"], ["run", "--dry-run"]):
        said = command(words[0], "job.yaml", *words[1:])
        assert said.code == 2, said.err
        told = said.err.splitlines()
        for part in ("nowhere.txt", "masked_lm does not train", "is no export", "only a cluster's nodes"):
            assert sum(part in line for line in told) == 1, said.err
        assert len(told) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "mine.txt"]


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warning", 0), ("missing", 1)])
def test_doctor_fails_where_something_is_missing(
    command: Any, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    found = [Finding("ok", "Python", "3.11"), Finding(verdict, "the moon", "none", "look up")]
    monkeypatch.setattr("orchestrator.launch.doctor.examine", lambda: found)
    shown, listed = command("doctor"), command("doctor", "--json")
    assert (shown.code, listed.code) == (code, code)
    assert "the moon" in shown.out
    assert json.loads(listed.out)[1] == {
        "verdict": verdict,
        "what": "the moon",
        "found": "none",
        "hint": "look up",
    }

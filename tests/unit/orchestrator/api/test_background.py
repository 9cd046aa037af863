"""A run in a process of its own: how it is looked at and ended before it trains. The notebook's test trains one."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job, write_text

from orchestrator import Job, RunFailed, run
from orchestrator.config.errors import InputError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_wrong_job_is_told_when_it_is_waited_for(tmp_path: Path) -> None:
    begun = run(Job(**job("missing.txt")), block=False)
    assert (begun.state, begun.status, begun.summary) == ("running", {}, {})
    with pytest.raises(
        RunFailed, match=r"^data.sources.0.uri .*missing.txt: there is no such file; check the path$"
    ):
        begun.wait(timeout=60)
    assert begun.state == "wrong input"
    with pytest.raises(InputError, match="this run has ended already"):
        begun.stop()
    assert not (tmp_path / "runs").exists()


def test_a_run_is_stopped_before_it_has_begun(tmp_path: Path) -> None:
    begun = run(Job(**job(write_text(tmp_path))), block=False)
    assert begun.stop(timeout=60).state == "stopped"
    assert begun.summary == {}


@pytest.mark.slow
def test_it_finds_the_modules_that_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook that has put a folder on its path."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "own_rate.py").write_text("raise ValueError('found')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    document = job(write_text(tmp_path))
    document["train"]["optimizer"] = {"name": "own_rate:build", "lr": 0.1}
    with pytest.raises(RunFailed, match=r"own_rate:build cannot be imported \(ValueError: found\)"):
        run(Job(**document), block=False).wait(timeout=60)


def test_a_function_that_shows_the_status_needs_a_caller_that_waits() -> None:
    with pytest.raises(InputError, match=r"^show: is called while this process waits"):
        run(Job(**job("a.txt")), block=False, show=print)

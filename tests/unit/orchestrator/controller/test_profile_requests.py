"""Requests for profiles in the run directory: each is given once, and old ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.workers import REQUEST, ProfileRequests
from orchestrator.storage import background_reader
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(background_reader, "EVERY", 0.0)
    (tmp_path / "profiles").mkdir()
    return RunDir(str(tmp_path))


@pytest.fixture
def requests(run: RunDir) -> Iterator[ProfileRequests]:
    found = ProfileRequests(run)
    yield found
    found.close()


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "ranks": [0], "steps": 2} | more


def test_a_request_is_given_once(run: RunDir, requests: ProfileRequests) -> None:
    assert requests.take() is None
    for name in ("a", "b"):
        run.write_json(REQUEST, asked(name))
        assert requests.take() == asked(name)
        assert requests.take() is None


def test_one_that_another_controller_was_asked_is_not_given(run: RunDir, requests: ProfileRequests) -> None:
    run.write_json(REQUEST, asked("old"))
    assert requests.take() is None
    run.write_json(REQUEST, asked("new"))
    assert requests.take() == asked("new")


@pytest.mark.parametrize("wrong", [{"id": "a"}, asked("a", ranks=0), asked("a", steps="x"), [], {}])
def test_what_is_no_request_is_passed_over(run: RunDir, requests: ProfileRequests, wrong: Any) -> None:
    requests.take()
    run.write_json(REQUEST, wrong)
    assert requests.take() is None


def test_a_damaged_file_is_no_request(run: RunDir, requests: ProfileRequests) -> None:
    requests.take()
    run.write_text(REQUEST, '{"id": ')
    assert requests.take() is None
    run.write_json(REQUEST, asked("a"))
    assert requests.take() == asked("a")

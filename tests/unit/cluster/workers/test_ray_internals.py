"""A start waits for its raylet as long as that lives; Ray itself gives up after 30 s, which a busy machine may take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.workers import ray_internals


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The answers of a head about its nodes, one after another; the last one is repeated."""
    script: list[list[dict[str, str]]] = []

    class State:
        def _initialize_global_state(self, options: Any) -> None:
            """There is no head to connect to."""

        def node_table(self) -> list[dict[str, str]]:
            return script.pop(0) if len(script) > 1 else script[0]

    monkeypatch.setattr("ray._private.state.GlobalState", State)
    monkeypatch.setattr("ray._private.services._get_gcs_client_options", lambda address: None)
    for name in ("OFTEN", "LOOK"):
        monkeypatch.setattr(ray_internals, name, 0.0)
    return script


def test_a_raylet_that_lives_is_waited_for_and_a_dead_one_is_not(
    answers: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    """A raylet that is dead, or was never started here, is left to Ray's own checks, which end."""
    get = ray_internals._awaited(lambda address, node: answers[0])
    answers.extend([[], [{"NodeID": "other"}]])
    assert get("127.0.0.1:1", "mine") == [{"NodeID": "other"}]
    shutil.copy("/bin/sleep", tmp_path / "raylet")
    with subprocess.Popen([str(tmp_path / "raylet"), "600"]) as raylet:
        answers[:] = [[]] * 50 + [[{"NodeID": "other"}, {"NodeID": "mine"}]]
        assert get("127.0.0.1:1", "mine")[-1] == {"NodeID": "mine"}
        assert len(answers) == 1, "every answer was waited for"
        raylet.kill()
        while ray_internals._has_raylet():  # until the kernel has ended it
            pass
        answers[:] = [[]]
        assert get("127.0.0.1:1", "mine") == []


def test_a_raylet_that_never_registers_ends_the_wait(
    answers: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "_has_raylet", lambda: True)
    monkeypatch.setattr(ray_internals, "REGISTERED", 0.0)
    answers.append([])
    assert ray_internals._awaited(lambda address, node: "as Ray says")("127.0.0.1:1", "mine") == "as Ray says"

"""A second command on a run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from orchestrator.config.errors import InputError
from orchestrator.launch import active_controller
from orchestrator.storage.run_directory import RunDir


def test_a_run_that_another_command_trains_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose command was killed a moment ago, and still holds the lock, is not."""
    monkeypatch.setattr(active_controller, "LOOKS", 1.0)
    monkeypatch.setattr(active_controller, "EVERY", 0.05)
    run = RunDir(str(tmp_path / "run"))
    active_controller.refuse_if_active(run)
    assert not (tmp_path / "run").exists()
    run.create()
    told = itertools.count()
    holder = RunDir(run.uri)
    with holder.lock():
        holder.write_json("status.json", {"time": 1.0})
        active_controller.refuse_if_active(run)
        read = RunDir.read_json_or_empty
        monkeypatch.setattr(
            RunDir, "read_json_or_empty", lambda self, name: {**read(self, name), "time": next(told)}
        )
        with pytest.raises(
            InputError, match="another command trains this run; wait for its end, or press Ctrl-C"
        ):
            active_controller.refuse_if_active(run)
    active_controller.refuse_if_active(run)

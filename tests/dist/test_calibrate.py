"""This machine is measured, whatever processor it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import orchestrator

from orchestrator.planner.device_profile import read


@pytest.mark.slow
def test_the_profile_of_this_machine_is_written(tmp_path: Path) -> None:
    done = orchestrator("calibrate", "--to", tmp_path / "here.yaml", cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "here.yaml")
    assert 1e8 < found.peak.bf16 < 1e14
    assert 1e9 < found.peak.fp32 < 1e13
    assert found.launch.value < 1e-3

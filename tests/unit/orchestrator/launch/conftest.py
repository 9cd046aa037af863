"""What tests of several modules of this folder need."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """An empty run directory."""
    found = RunDir(str(tmp_path / "runs" / "small"))
    found.create()
    return found

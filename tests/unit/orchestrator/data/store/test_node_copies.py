"""Where a node has its copies of prepared data."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.data.store.node_copies import copies_of


def test_copies_are_not_where_others_can_put_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"orchestrator-tokens-{os.getuid()}"
    data = SimpleNamespace(fingerprint="abc")
    assert copies_of(data) == usual / "abc"  # type: ignore[arg-type]
    usual.chmod(0o777)
    found = copies_of(data)  # type: ignore[arg-type]
    assert found.name == "abc"
    assert found.parent != usual
    assert found.parent.stat().st_mode & 0o777 == 0o700

"""Temporary files that nobody else has put there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from orchestrator.storage.own_folder import own_folder, own_folder_or_another


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_this_user_s_alone(temporary: Path) -> None:
    left = temporary / f"orchestrator-tokens-{os.getuid()}"
    left.mkdir(mode=0o755)  # by an earlier version
    assert own_folder("tokens") == own_folder_or_another("tokens") == left
    assert left.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["another's", "open", "link", "file"])
def test_what_is_another_s_is_not_used(
    how: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = temporary / f"orchestrator-tokens-{os.getuid()}"
    match how:
        case "another's":
            usual.mkdir(mode=0o700)
            lstat = os.lstat

            def told(path: Path) -> os.stat_result:
                found = lstat(path)
                given = list(found)
                given[4] += path == usual  # its owner
                return os.stat_result(given)

            monkeypatch.setattr(Path, "lstat", told)
        case "open":
            usual.mkdir()
            usual.chmod(0o777)
        case "link":
            (temporary / "theirs").mkdir(mode=0o700)
            usual.symlink_to(temporary / "theirs")
        case "file":
            usual.write_text("")
    with pytest.raises(OSError, match=str(usual)):
        own_folder("tokens")
    other = own_folder_or_another("tokens")
    assert other.parent == temporary
    assert other != usual
    assert other.stat().st_mode & 0o777 == 0o700
    assert str(other) in capsys.readouterr().out
    assert own_folder_or_another("tokens") == other
    assert capsys.readouterr().out == ""

"""What a path or URI says by itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.config.paths import absolute
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import check_uri, is_local, unwritable


@pytest.mark.parametrize(
    ("uri", "local"),
    [
        ("runs/a", True), ("file:///a", True), ("local://a", True), ("runs/a::b", True), ("a::v2", True),
        ("s3://bucket/a", False), ("simplecache::s3://bucket/a", False), ("zip://a.txt::b.zip", False),
        ("zip://a.txt::file:///b.zip", False),
    ],
)  # fmt: skip
def test_a_chain_of_file_systems_has_a_protocol_and_all_else_is_a_path(uri: str, local: bool) -> None:
    assert is_local(uri) == local


def test_a_run_whose_name_has_two_colons_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the run whose name is what stands before them."""
    (tmp_path / "runs" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_uri("runs/c::d")
    place = absolute("runs/c::d", Path.cwd())
    assert place == str(tmp_path / "runs" / "c::d")
    run = RunDir(place)
    run.create()
    run.write_json("summary.json", {})
    assert (Path(place) / "summary.json").is_file()
    assert list((tmp_path / "runs" / "c").iterdir()) == []


def test_why_a_folder_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert unwritable(str(tmp_path / "new/run")) == ""
    assert unwritable(str(tmp_path / "file/run")) == "Not a directory"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert unwritable(str(tmp_path / "new/run")) == "Permission denied"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert unwritable(str(tmp_path / "new/run")) == "Read-only file system"

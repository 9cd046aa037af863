from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.store.data_folder import DataFolder


@pytest.mark.parametrize("remote", [False, True])
def test_files_are_written_whole_and_read_back(tmp_path: Path, remote: bool) -> None:
    folder = DataFolder(f"memory://{uuid.uuid4().hex}/" if remote else f"{tmp_path}/new/")
    assert folder.local is not remote
    assert folder.read("a/b.bin") is None
    assert folder.read_json("c.json") is None
    assert folder.sizes("a") == {}
    for data in (b"first", b"second"):
        folder.write("a/b.bin", data)
        assert folder.read("a/b.bin") == data
    folder.write_json("c.json", {"x": [1]})
    assert DataFolder(folder.uri).read_json("c.json") == {"x": [1]}
    assert folder.sizes("a") == {"b.bin": 6}


def test_an_unknown_protocol_is_told() -> None:
    with pytest.raises(InputError, match=r"'nowhere://x' is not a path or URI"):
        DataFolder("nowhere://x")


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    old, young = f"shard-00000.bin.{'a' * 32}.tmp", f"shard-00000.bin.{'b' * 32}.tmp"
    for name in (old, young, "shard-00000.bin", "mine.tmp"):
        (tmp_path / name).write_text("torn")
    for name in (old, "shard-00000.bin", "mine.tmp"):
        os.utime(tmp_path / name, (1.0, 1.0))
    DataFolder(str(tmp_path)).remove_old_drafts()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "shard-00000.bin", young]

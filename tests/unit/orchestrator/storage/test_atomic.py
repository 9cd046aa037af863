"""A folder in the place of an older one, whose foreign files stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.storage.atomic import replace_folder


def ours(name: str) -> bool:
    return name.startswith("our")


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def held(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_where_nothing_was(tmp_path: Path) -> None:
    replace_folder(str(make(tmp_path / "draft", {"our": "new"})), str(tmp_path / "target"), ours)
    assert held(tmp_path) == {"target/our": "new"}


def test_what_is_foreign_stays_and_what_was_ours_goes(tmp_path: Path) -> None:
    make(
        tmp_path / "target",
        {"our": "old", "our-other": "old", "ours/a": "old", "notes": "mine", "more/a": "mine"},
    )
    replace_folder(str(make(tmp_path / "draft", {"our": "new"})), str(tmp_path / "target"), ours)
    assert held(tmp_path) == {"target/our": "new", "target/notes": "mine", "target/more/a": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["target"]


def test_a_foreign_file_in_whose_place_there_is_a_new_one_is_not_lost(tmp_path: Path) -> None:
    make(tmp_path / "target", {"report": "mine"})
    replace_folder(str(make(tmp_path / "draft", {"report": "new"})), str(tmp_path / "target"), ours)
    assert held(tmp_path) == {"target/report": "new", "draft.old/report": "mine"}


def test_a_link_that_was_ours_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    make(tmp_path / "far", {"a": "mine"})
    make(tmp_path / "target", {"our": "old"})
    (tmp_path / "target/our-link").symlink_to(tmp_path / "far")
    replace_folder(str(make(tmp_path / "draft", {"our": "new"})), str(tmp_path / "target"), ours)
    assert held(tmp_path) == {"far/a": "mine", "target/our": "new"}


def test_a_target_that_is_a_link_stays_one(tmp_path: Path) -> None:
    make(tmp_path / "far", {"our": "old"})
    (tmp_path / "target").symlink_to(tmp_path / "far")
    replace_folder(str(make(tmp_path / "draft", {"our": "new"})), str(tmp_path / "target"), ours)
    assert (tmp_path / "target").is_symlink()
    assert held(tmp_path / "far") == {"our": "new"}


def test_a_crash_between_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "target", {"our": "old", "notes": "mine"})
    make(tmp_path / "draft", {"our": "new"})
    plain, calls = os.replace, []

    def replace(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("killed")
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="killed"):
        replace_folder(str(tmp_path / "draft"), str(tmp_path / "target"), ours)
    assert held(tmp_path) == {"draft/our": "new", "draft.old/our": "old", "draft.old/notes": "mine"}

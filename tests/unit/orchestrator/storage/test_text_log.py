"""Text in files of bounded size, on a local file system and on an object store."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from orchestrator.storage import text_log
from orchestrator.storage.text_log import TextLog, TextLogs


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(text_log, "PART_BYTES", 10)
    monkeypatch.setattr(text_log, "PARTS", 3)
    if request.param == "local":
        return str(tmp_path / "logs" / "attempt-1")
    fsspec.filesystem("memory").store.clear()
    return f"memory://run-{tmp_path.name}/logs/attempt-1"


def test_what_is_appended_is_read_back_piece_by_piece(folder: str) -> None:
    log, reader = TextLog(folder, "rank-0.log"), TextLogs(folder)
    assert reader.parts() == {}
    place = (0, 0)
    for text in (b"one", b" and two, which needs three files", b"!"):
        log.append(text)
        data, *rest = reader.read("rank-0.log", reader.parts()["rank-0.log"], *place)
        assert data == text
        place = (rest[0], rest[1])
    assert reader.read("rank-0.log", reader.parts()["rank-0.log"], *place)[0] == b""
    assert (
        reader.read("rank-0.log", reader.parts()["rank-0.log"])[0] == b"one and two, which needs three files!"
    )


def test_the_beginning_and_the_end_of_a_long_text_are_kept(folder: str) -> None:
    log = TextLog(folder, "rank-10.log")
    TextLog(folder, "rank-9.log").append(b"x")
    log.append(b"".join(b"%09d\n" % number for number in range(20)))
    reader = TextLogs(folder)
    assert list(reader.parts()) == ["rank-9.log", "rank-10.log"]
    kept = reader.read("rank-10.log", reader.parts()["rank-10.log"])[0].split()
    assert [int(word) for word in kept] == [0, 17, 18, 19]


def test_a_run_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    log = TextLog(str(tmp_path / "run" / "logs" / "attempt-1"), "rank-0.log")
    with pytest.raises(FileNotFoundError):
        log.append(b"x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    log.append(b"x")
    assert TextLogs(str(tmp_path / "run" / "logs")).folders() == ["attempt-1"]


def test_old_texts_are_removed_where_they_are(folder: str) -> None:
    for name in ("1.log", "2.log", "10.log"):
        TextLog(folder, name).append(b"more than one file of text")
    above = TextLogs(folder.rpartition("/")[0])
    above.inside("attempt-1").keep(2)
    assert list(TextLogs(folder).parts()) == ["2.log", "10.log"]
    above.remove("attempt-1")
    assert TextLogs(folder).parts() == {}

"""Data that is streamed by a preparation that is killed, or whose disk fills up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tmpfs import mounted

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import part_tasks
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.published import section_name, so_far
from orchestrator.data.store.data_folder import DataFolder


class KilledError(BaseException):
    """In the place of the end of a process."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSpec:
    """Ten parts, whose tasks run in this process."""

    def here(task: Any, rows: list[dict[str, Any]], cache: str, *_: Any, **__: Any) -> Iterator[int]:
        for done, row in enumerate(rows, 1):
            part_tasks.raise_error(part_tasks.run_task(task, cache, row))
            yield done

    monkeypatch.setattr(part_tasks, "run_tasks", here)
    monkeypatch.setattr(sources, "part_size", lambda files: 1_000)
    (tmp_path / "text.txt").write_text("".join(f"line {n} of many\n<|endoftext|>\n" for n in range(320)))
    (tmp_path / "tokenizer.json").write_text(train_bytes(["line of many 0123456789"], 300, ()))
    return DataSpec(
        sources=[{"uri": str(tmp_path / "text.txt")}],
        tokenizer=str(tmp_path / "tokenizer.json"),
        sequence_length=16,
        streaming=True,
    )


def stream(data: DataSpec, cache: Path) -> Path:
    """Prepare data as a run does that begins with its first section."""
    begun = prepare(data, (), str(cache), begin=True)
    assert prepare(data, (), str(cache)) == begun
    return Path(begun)


def test_progress_tells_of_the_parts_that_are_to_be_made(data: DataSpec, tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []

    def tell(stage: str, done: int, total: int, text_bytes: int = 0) -> None:
        if stage == "tokens":
            told.append((done, total, text_bytes))

    cache = str(tmp_path / "told")
    begun = SectionPlan.read(DataFolder(prepare(data, (), cache, tell, begin=True)))
    assert begun
    first, every, (needed, size) = begun.needed(0)[0], begun.parts[0], begun.bytes[0]
    assert 0 < first < every
    assert (told[0], told[-1]) == ((0, first, needed), (first, first, needed))
    told.clear()
    prepare(data, (), cache, tell)
    assert (told[0], told[-1]) == ((first, every, size), (every, every, size))


def content(made: Path) -> dict[str, bytes]:
    return {str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*") if path.is_file()}


def test_killed_at_any_write_it_goes_on_to_the_same_bytes_and_keeps_what_was_published(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the node is lost on which the run's controller prepares."""
    written, last, write = 0, 10**6, DataFolder.write

    def counted(self: DataFolder, name: str, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > last:
            raise KilledError
        write(self, name, data)

    monkeypatch.setattr(DataFolder, "write", counted)
    quiet = content(stream(data, tmp_path / "quiet"))
    every, reached = written, set[int]()
    assert every > 50
    for kill in range(3, every, 5):
        cache = tmp_path / str(kill)
        written, last = 0, kill
        with pytest.raises(KilledError):
            stream(data, cache)
        (made,) = (path for path in cache.iterdir() if path.name != "tokens")
        there = so_far(DataFolder(str(made)))
        reached.add(there[1] if there else 0)
        published = content(made / "sections")
        last = 10**6
        assert content(stream(data, cache)) == quiet
        assert published.items() <= content(made / "sections").items()
    assert len(reached) > 5


def test_where_the_disk_fills_up_what_is_published_stays_and_the_same_command_goes_on(
    data: DataSpec, tmp_path: Path
) -> None:
    quiet = content(stream(data, tmp_path / "quiet"))
    with mounted(tmp_path / "disk", "1m") as disk:

        def fill(stage: str, done: int, total: int, text_bytes: int = 0) -> None:
            if stage == "tokens" and done == 5:
                with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(bytes(1 << 12)):
                        continue

        with pytest.raises(
            InputError, match=r"No space left on device.*free space.*run the same command again"
        ) as told:
            prepare(data, (), str(disk / "cache"), fill)
        assert "\n" not in str(told.value)
        (made,) = (path for path in (disk / "cache").iterdir() if path.name != "tokens")
        assert (made / section_name(0)).read_bytes() == quiet[section_name(0)]
        assert not (made / "manifest.json").exists()
        (disk / "filler").unlink()
        assert content(stream(data, disk / "cache")) == quiet

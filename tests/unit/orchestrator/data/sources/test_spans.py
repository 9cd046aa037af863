from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from fsspec import register_implementation
from fsspec.registry import _registry
from virtual_file import PROTOCOL, CountedFileSystem, lines_in, size_of

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources.rows import rows


@pytest.fixture(autouse=True)
def counted_files() -> Iterator[None]:
    register_implementation(PROTOCOL, CountedFileSystem)
    yield
    _registry.pop(PROTOCOL)


def parts_of(lines: int, part_bytes: int | None = None) -> list[sources.Part]:
    files = sources.resolve([Source(uri=f"{PROTOCOL}://lines/{lines}.jsonl")])
    return sources.cut(files, part_bytes or sources.part_size(files))


def counted(part: sources.Part) -> list[int]:
    return [int(str(row.values["text"]).split(" ", 1)[0]) for span in part for row in rows(span)]


@pytest.mark.parametrize(("lines", "part_bytes"), [(20, 5_003), (60, 50_021), (200, 10**6)])
def test_each_line_of_a_divided_file_is_in_one_part(lines: int, part_bytes: int) -> None:
    parts = parts_of(lines, part_bytes)
    assert [number for part in parts for number in counted(part)] == list(range(lines))
    assert len(parts) == -(-size_of(lines) // part_bytes)


def test_parts_of_a_file_of_100_gb_follow_each_other_up_to_its_end() -> None:
    lines = lines_in(10**11)
    parts = parts_of(lines)
    assert 2900 < len(parts) < 3100
    assert sum(span.bytes for part in parts for span in part) == size_of(lines)
    assert len(sources.to_json(parts[-1], 2**26)) < 1000  # what a task is told does not grow with the file
    last = [counted(part) for part in parts_of(lines, 10**6)[-3:]]
    assert list(chain(*last)) == list(range(last[0][0], lines))

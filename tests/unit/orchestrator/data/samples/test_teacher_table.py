"""Stored logits of a teacher: what was written is read, in any order; what is missing or damaged is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.samples import teacher_table
from orchestrator.data.samples.first_use import FirstUse
from orchestrator.data.samples.order import Order
from orchestrator.data.samples.teacher_table import TeacherTable, TopRecords

SAMPLES, LENGTH, K = 7, 3, 2


def records(part: Sequence[int] | np.ndarray) -> TopRecords:
    """Numbers that follow from the sample's."""
    numbers = np.array(part)
    wide = np.broadcast_to(numbers[:, None, None], (len(part), LENGTH, K))
    return TopRecords(
        wide.astype("<i4"), wide * 0.5, np.broadcast_to(numbers[:, None], (len(part), LENGTH)) + 0.25
    )


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TeacherTable:
    monkeypatch.setattr(teacher_table, "MOST", 3)
    return TeacherTable(str(tmp_path), "key", SAMPLES, LENGTH, K)


def test_parts_are_written_once_and_records_read_in_any_order(table: TeacherTable, tmp_path: Path) -> None:
    assert table.parts == [range(3), range(3, 6), range(6, 7)]
    assert table.missing() == [0, 1, 2]
    for number in (2, 0):
        table.write(table.name(number), records(table.parts[number]), mass=0.9 * LENGTH, tokens=LENGTH)
    assert table.missing() == [1]
    table.write(table.name(1), records(table.parts[1]), mass=0.6 * LENGTH, tokens=LENGTH)
    assert table.missing() == []
    assert table.finish({"teacher": "large"}) == pytest.approx(0.8)
    written = json.loads((tmp_path / "teacher/key/manifest.json").read_text())
    assert written == {"teacher": "large", "k": K, "samples": SAMPLES, "mass": pytest.approx(0.8)}
    asked = np.array([6, 0, 4, 0])
    found = table.read(asked)
    for values, wanted in zip(found, records(range(7)), strict=True):
        np.testing.assert_array_equal(values, wanted[asked])


def test_parts_in_the_order_of_use_are_named_by_their_samples(tmp_path: Path) -> None:
    """A longer run finds the whole parts of a shorter one, and not its last one, which has other samples."""

    def table_of(positions: int) -> TeacherTable:
        order = FirstUse(Order(1, (SAMPLES,), (1.0,)), SAMPLES, positions, size=2)
        return TeacherTable(str(tmp_path), "key", SAMPLES, LENGTH, K, order=order)

    short = table_of(3)
    needed = np.concatenate([np.asarray(part) for part in short.parts])
    assert short.lacks(needed) == short.missing() == [0, 1]
    for number, part in enumerate(short.parts):
        assert not short.has(short.name(number), len(part))
        short.write(short.name(number), records(part), mass=0.5, tokens=1)
        assert short.has(short.name(number), len(part))
    assert short.lacks(needed) == short.missing() == []
    long = table_of(SAMPLES)
    assert long.missing() == [1, 2, 3]
    assert long.lacks(needed) == [1]
    long.write(long.name(1), records(long.parts[1]), mass=0.5, tokens=1)
    for table in (short, long):
        for values, wanted in zip(table.read(needed), records(range(SAMPLES)), strict=True):
            np.testing.assert_array_equal(values, wanted[needed])


def test_a_damaged_record_and_a_missing_part_are_told(table: TeacherTable, tmp_path: Path) -> None:
    for number, part in enumerate(table.parts):
        table.write(table.name(number), records(part), mass=1.0, tokens=1)
    path = tmp_path / "teacher/key/000001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last record of the part
    path.write_bytes(bytes(data))
    table.read(np.array([3, 4]))
    with pytest.raises(
        InputError, match=r"000001.bin: the stored logits of a teacher are damaged; remove the file"
    ):
        table.read(np.array([5]))
    path.write_bytes(bytes(data[:-1]))
    assert table.missing() == [1]
    path.unlink()
    with pytest.raises(InputError, match=r"000001.bin"):
        table.read(np.array([3]))

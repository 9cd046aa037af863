from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.data.samples import reference_table
from orchestrator.data.samples.reference_table import ReferenceTable


def test_a_part_that_is_missing_or_damaged_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_table, "PART", 4)
    table = ReferenceTable(str(tmp_path), "key", 10)
    assert [len(part) for part in table.parts] == [4, 4, 2]
    assert np.isnan(table.read()).all()
    values = np.arange(20, dtype=np.float32).reshape(10, 2)
    for number, part in enumerate(table.parts):
        table.write(number, values[part.start : part.stop])
    assert np.array_equal(table.read(), values)
    assert np.isnan(ReferenceTable(str(tmp_path), "other", 10).read()).all()
    path = tmp_path / "reference/key/000001.bin"
    data = path.read_bytes()
    for damaged in (data[:-1], b"", data[:9] + bytes([data[9] ^ 1]) + data[10:]):
        path.write_bytes(damaged)
        found = table.read()
        assert np.isnan(found[4:8]).all()
        assert np.array_equal(found[:4], values[:4])
        assert np.array_equal(found[8:], values[8:])

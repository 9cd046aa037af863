"""Files that pyarrow's package has for its own tests: written by old versions, with indexes, compressed blocks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.sources.rows import rows

FOLDER = Path(pa.__file__).parent / "tests" / "data"
FILES = sorted(
    str(path.relative_to(FOLDER)) for suffix in ("parquet", "feather") for path in FOLDER.rglob(f"*.{suffix}")
)


def test_the_package_has_them() -> None:
    assert len(FILES) >= 5


@pytest.mark.contract
@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_that_pyarrow_reads(name: str) -> None:
    path = FOLDER / name
    wanted = (parquet if path.suffix == ".parquet" else feather).read_table(path).to_pylist()
    columns = {f"c{number}": column for number, column in enumerate(wanted[0])}
    files = sources.resolve([Source(uri=str(path), field=columns)])
    found = [
        row.values for part in sources.cut(files, 10**9) for span in part for row in rows(span, Rejected(), 7)
    ]
    assert found == wanted

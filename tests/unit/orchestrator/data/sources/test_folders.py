"""Folders in the manner of Hive, `lang=en/`, as columns: the values that pyarrow reads, as texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from raw_files import read

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.prepare import fingerprint
from orchestrator.data.sources.identity import part_key
from orchestrator.data.sources.rows import rows

FIELD = {"text": "t", "label": "lang", "pair": "year"}


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A folder that pyarrow divides by two columns, and the rows as it reads them again."""
    rows = {
        "t": [f"text {n}" for n in range(6)],
        "lang": ["en", "de", "pt/BR", "a b=c", None, "ü"],
        "year": [1, 1, 2, 2, 3, 3],
    }
    ds.write_dataset(
        pa.table(rows),
        tmp_path / "by",
        format="parquet",
        partitioning=["lang", "year"],
        partitioning_flavor="hive",
    )
    found = ds.dataset(tmp_path / "by", partitioning="hive").to_table().sort_by("t").to_pylist()
    return tmp_path / "by", found


def read_rows(uri: str, field: Any = FIELD, data_format: int = 6) -> list[dict[str, Any]]:
    parts = sources.cut(sources.resolve([Source(uri=uri, field=field)]), 2**20)
    spans = [span for part in parts for span in sources.from_json(sources.to_json(part, 100))]
    return sorted(
        (dict(row.values) for span in spans for row in rows(span, data_format=data_format)),
        key=lambda r: r["t"],
    )


def test_the_values_are_those_that_pyarrow_reads(table: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, theirs = table
    assert [row["lang"] for row in theirs] == ["en", "de", "pt/BR", "a b=c", None, "ü"]
    found = read_rows(str(folder))
    assert found == [{**row, "year": str(row["year"])} for row in theirs]
    assert read_rows(f"{folder}/**/*.parquet") == found
    joined = sorted(read(folder, field="{lang}: {t}"))  # a document of which a value is null is none
    assert joined == sorted(f"{row['lang']}: {row['t']}" for row in theirs if row["lang"] is not None)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_lines_have_them_too_and_a_column_of_their_own_comes_before(kind: str, tmp_path: Path) -> None:
    for name, lang in (("lang=en", None), ("lang=de", "at")):
        (tmp_path / name).mkdir()
        row = {"t": f"of {name}"} | ({"lang": lang} if lang else {})
        text = json.dumps(row) + "\n" if kind == "jsonl" else f"{','.join(row)}\n{','.join(row.values())}\n"
        (tmp_path / name / f"a.{kind}").write_text(text)
    found = read_rows(str(tmp_path), {"text": "t", "label": "lang"})
    assert found == [{"t": "of lang=de", "lang": "at"}, {"t": "of lang=en", "lang": "en"}]


def test_on_a_store(table: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, theirs = table
    fs = fsspec.filesystem("memory")
    fs.put(str(folder), "/hive", recursive=True)
    try:
        assert [row["lang"] for row in read_rows("memory://hive")] == [row["lang"] for row in theirs]
    finally:
        fs.rm("/hive", recursive=True)


def test_what_folders_say_is_part_of_what_data_is(tmp_path: Path) -> None:
    """Two files of the same bytes below folders that differ; where nothing names the folders, they do not matter."""
    keys, names, old = [], [], []
    for lang in ("en", "de"):
        (tmp_path / f"lang={lang}").mkdir()
        pq.write_table(pa.table({"t": ["a"]}), tmp_path / f"lang={lang}" / "a.parquet")
        for field in ("{lang}: {t}", "t"):
            files = sources.resolve([Source(uri=str(tmp_path / f"lang={lang}"), field=field)])
            keys.append(part_key(sources.cut(files, 2**20)[0]))
            names.append(fingerprint.fingerprint(files, ["x", {}], 300))
            old.append(fingerprint.fingerprint(files, ["x", {}], 300, 5))
    for each in (keys, names):
        assert each[0] != each[2]
        assert each[1] == each[3]
    assert old[0] == old[2]


def test_data_of_an_earlier_format_has_no_such_columns(table: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [set(row) for row in read_rows(str(table[0]), data_format=5)] == [{"t"}] * 6
    with pytest.raises(InputError, match="has no column 'language'"):
        read_rows(str(table[0]), "language")

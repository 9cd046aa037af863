"""A small part of a job's data: whole files while they are small, and of a large one the beginning."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.sources import resolve
from orchestrator.verify.rehearsal.text import LEAST, excerpt

LARGE = 3 * LEAST


def excerpt_of(place: Path | str, tmp_path: Path, **more: object) -> list[Path]:
    (found,) = excerpt(
        [Source(uri=str(place), **more)], "data.sources", "fail", tmp_path / "little", enough=LEAST
    )
    assert all(Path(place).is_file() for place in found.uris)
    return [Path(place) for place in found.uris]


def test_small_files_are_read_where_they_are(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("words\n" * (LEAST // 3 // 6))
    found = excerpt_of(tmp_path / "*.txt", tmp_path)
    assert found == [tmp_path / f"{number}.txt" for number in range(3)]


@pytest.mark.parametrize("compress", [False, True])
def test_lines_of_the_beginning_are_whole(tmp_path: Path, compress: bool) -> None:
    lines = [json.dumps({"text": f"line {number} " + "ä" * 50}, ensure_ascii=False) for number in range(9999)]
    text = ("\n".join(lines) + "\n").encode()
    path = tmp_path / ("a.jsonl.gz" if compress else "a.jsonl")
    path.write_bytes(gzip.compress(text, 0) if compress else text)
    (found,) = excerpt_of(path, tmp_path)
    assert found.suffix == ".jsonl"
    read = found.read_text().splitlines()
    assert read == lines[: len(read)]
    assert LEAST - 200 < found.stat().st_size <= LEAST


def test_the_beginning_keeps_the_names_of_labels(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    label = {"name": "label", "dtype": {"class_label": {"names": {"0": "bad", "1": "good"}}}}
    (tmp_path / "hub" / "README.md").write_text(
        f"---\n{yaml.safe_dump({'dataset_info': {'features': [label]}})}---\n"
    )
    path = tmp_path / "hub" / "a.jsonl"
    path.write_text(json.dumps({"text": "a" * 90, "label": 1}) + "\n")
    field = {"text": "text", "label": "label"}
    (near,) = excerpt_of(path, tmp_path, field=field)
    path.write_text(path.read_text() * (LARGE // 100))
    (far,) = excerpt_of(path, tmp_path, field=field)
    assert near == path
    assert far != path
    for place in (near, far):
        (file,) = resolve([Source(uri=str(place), field=field)])
        assert file.labels == {"label": ["bad", "good"]}


def test_a_cell_with_line_breaks_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([f"one {n}\ntwo\nthree" * 20] for n in range(LARGE // 300))])
    (found,) = excerpt_of(path, tmp_path)
    with found.open(newline="") as file:
        rows = list(csv.reader(file, strict=True))
    assert rows[0] == ["text"]
    assert len(rows) > 100
    assert rows[-1][0].endswith("three")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_of_a_large_table_the_first_rows_are_taken_with_their_schema(suffix: str, tmp_path: Path) -> None:
    """The schema says which label a number is."""
    texts = [f"row {number} " + "x" * 100 for number in range(LARGE // 50)]
    schema = pa.schema([("text", pa.string()), ("other", pa.string())], {"huggingface": "names"})
    path = tmp_path / f"lang=en%2FUS/a{suffix}"
    path.parent.mkdir()
    table = pa.table({"text": texts, "other": texts}, schema)
    if suffix == ".parquet":
        pq.write_table(table, path, compression="none")
    else:
        with pa.ipc.new_stream(path, schema) as writer:
            writer.write_table(table)
    field = {"text": "text", "label": "lang"}
    (found,) = excerpt_of(path, tmp_path, field=field)
    kept = pq.ParquetFile(found).read()
    assert kept.column("text").to_pylist() == texts[: kept.num_rows]
    assert 0 < kept.num_rows < len(texts)
    assert kept.schema.names == ["text"]
    assert kept.schema.metadata[b"huggingface"] == b"names"
    assert [file.folders for file in resolve([Source(uri=str(found), field=field)])] == [{"lang": "en/US"}]


def test_a_large_list_of_json_becomes_lines(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} " + "x" * 100} for number in range(LARGE // 50)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (found,) = excerpt_of(tmp_path / "a.json", tmp_path)
    read = [json.loads(line) for line in found.read_text().splitlines()]
    assert read == rows[: len(read)]
    assert 0 < len(read) < len(rows)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        excerpt([Source(uri=str(tmp_path / "none.txt"))], "data.sources", "fail", tmp_path)

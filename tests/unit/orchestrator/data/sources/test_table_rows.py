"""Columns of tables by their types: what is read of each is what the same rows have as lines of JSON."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.sources.rows import rows

TEXTS = ["a", None, "é"]
LISTS = [["a", "b"], None, []]
MAPS = [[("a", "x"), ("b", None)], None, []]
JSONS = ['{"a": {"b": [1, null]}}', None, "null"]
_JSON = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[1]"]))
_MAPS = pa.MapArray.from_arrays(pa.array([0, None, None, 1], pa.int32()), pa.array(["k"]), _JSON)
_DEEP = pa.StructArray.from_arrays([_MAPS, pa.array([1, None, None])], ["m", "n"])
COLUMNS: dict[str, tuple[pa.Array, list[Any]]] = {
    "string": (pa.array(TEXTS), TEXTS),
    "large_string": (pa.array(TEXTS, pa.large_string()), TEXTS),
    "dictionary": (pa.array(TEXTS).dictionary_encode(), TEXTS),
    "dictionary of large": (pa.array(TEXTS, pa.large_string()).dictionary_encode(), TEXTS),
    "null": (pa.nulls(3), [None] * 3),
    "list": (pa.array(LISTS), LISTS),
    "large_list": (pa.array(LISTS, pa.large_list(pa.large_string())), LISTS),
    "fixed list": (pa.array([["a"], ["b"], ["c"]], pa.list_(pa.string(), 1)), [["a"], ["b"], ["c"]]),
    "map": (pa.array(MAPS, pa.map_(pa.string(), pa.string())), [{"a": "x", "b": None}, None, {}]),
    "json": (pa.array(JSONS, pa.json_()), [{"a": {"b": [1, None]}}, None, None]),
    "large json": (pa.array(JSONS, pa.json_(pa.large_string())), [{"a": {"b": [1, None]}}, None, None]),
    "deep": (
        pa.ListArray.from_arrays(pa.array([0, None, 2, 3], pa.int32()), _DEEP),
        [[{"m": {"k": [1]}, "n": 1}, {"m": None, "n": None}], None, [{"m": None, "n": None}]],
    ),
    "bool": (pa.array([True, None, False]), [True, None, False]),
}


def read(
    path: Path, field: Any, data_format: int = 6, on_error: str = "fail", rejected: Any = None
) -> list[Any]:
    files = sources.resolve([Source(uri=str(path), field=field)], on_error=on_error)
    found = [span for part in sources.cut(files, 2**20) for span in part]
    return [row.values for span in found for row in rows(span, rejected, data_format)]


def write(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_has_the_values_of_lines(name: str, suffix: str, tmp_path: Path) -> None:
    column, wanted = COLUMNS[name]
    path = write(tmp_path / f"a{suffix}", pa.table({"c": column, "t": ["x", "y", "z"]}))
    if suffix == ".arrow" and name.startswith("dictionary"):  # whose batches need a message before them
        with pytest.raises(InputError, match="dictionary-encoded columns"):
            read(path, {"text": "t", "label": "c"})
        return
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        "".join(json.dumps({"c": value, "t": t}) + "\n" for value, t in zip(wanted, "xyz", strict=True))
    )
    found = read(path, {"text": "t", "label": "c"})
    assert found == read(lines, {"text": "t", "label": "c"})
    assert [row["c"] for row in found] == wanted


def test_paths_enter_maps_and_json(tmp_path: Path) -> None:
    from orchestrator.data.sources.documents import pieces

    table = pa.table(
        {
            "m": pa.array([[("lang", "en"), ("title", "one")]], pa.map_(pa.string(), pa.string())),
            "j": pa.array(['{"body": ["a", "two"]}'], pa.json_()),
        }
    )
    for suffix in (".parquet", ".arrow"):
        path = write(tmp_path / f"a{suffix}", table)
        (part,) = sources.cut(sources.resolve([Source(uri=str(path), field="{m.title}: {j.body[1]}")]), 2**20)
        assert [piece.text for piece in pieces(part[0])] == ["one: two"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_what_cannot_be_a_mapping_or_json_is_told(suffix: str, tmp_path: Path) -> None:
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    none = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{a: 1}"]))
    for column, said in ((twice, "duplicate key"), (none, "Expecting property name")):
        path = write(tmp_path / f"a{suffix}", pa.table({"c": column}))
        with pytest.raises(InputError, match=f"row 1: cannot be read from row 1 on .*{said}") as caught:
            read(path, "c")
        assert len(str(caught.value).splitlines()) == 1
        rejected = Rejected()
        assert read(path, "c", on_error="skip", rejected=rejected) == []
        assert rejected.to_json()[0]["count"] == 1


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_data_of_an_earlier_format_is_read_as_it_was(suffix: str, tmp_path: Path) -> None:
    table = pa.table({name: COLUMNS[name][0] for name in ("map", "json")})
    found = read(write(tmp_path / f"a{suffix}", table), ("map", "json"), 5)
    assert [row["map"] for row in found] == MAPS
    assert [row["json"] for row in found] == JSONS


def archive(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w") as found:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            found.addfile(info, io.BytesIO(text.encode()))
    return path


def test_members_of_an_archive_are_called_so_in_small_and_in_capital_letters(tmp_path: Path) -> None:
    """The library webdataset makes all small, Hugging Face's leaves them as they are: either name is right."""
    members = {
        "0.TXT": "a",
        "0.Json": '{"Cap": "b"}',
        "0.seg.CLS": "c",
        "1.txt": "d",
        "1.json": '{"Cap": "e"}',
        "1.Seg.cls": "f",
    }
    path = archive(tmp_path / "a.tar", members)
    for names in (("txt", "json.Cap", "seg.cls"), ("TXT", "Json.Cap", "SEG.cls")):
        found = read(path, dict(zip(("text", "pair", "label"), names, strict=True)))
        text, caption, label = names
        assert [row[text] for row in found] == ["a", "d"]
        assert [row[caption.split(".")[0]] for row in found] == [{"Cap": "b"}, {"Cap": "e"}]
        assert [row[label] for row in found] == ["c", "f"]
    both = read(path, {"text": "txt", "pair": "TXT"})
    assert [(row["txt"], row["TXT"]) for row in both] == [("a", "a"), ("d", "d")]
    assert ["txt" in row for row in read(path, "txt", 5)] == [False, True]
    twice = archive(tmp_path / "b.tar", {"0.txt": "a", "0.TXT": "b"})
    with pytest.raises(InputError, match=r"0.TXT is there twice"):
        read(twice, "txt")

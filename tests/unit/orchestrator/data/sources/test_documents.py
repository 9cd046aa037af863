from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.sources import Span, cut, resolve, text_rows
from orchestrator.data.sources.documents import pieces

SEPARATOR = "<|endoftext|>"
LINES = st.lists(
    st.sampled_from(
        ["", "a", "été", "long " * 9, SEPARATOR, SEPARATOR + " ", " " + SEPARATOR, "\u2028", "x\r"]
    )
)


def read(path: Path, part_bytes: int = 10**9, field: str = "text") -> list[str]:
    """The documents of a file that was cut in parts; the last item is what no document's end follows."""
    spans = [s for part in cut(resolve([Source(uri=str(path), field=field)]), part_bytes) for s in part]
    return assemble(spans)


def assemble(spans: list[Span]) -> list[str]:
    found, held = [], ""
    for piece in (p for span in spans for p in pieces(span)):
        assert piece.bytes == len(piece.text.encode())
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    assert held == ""
    return found


def expected(lines: list[str]) -> list[str]:
    """The documents of a text, by the definition: runs of lines between separators."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line == SEPARATOR:
            found.append([])
        else:
            found[-1].append(line)
    return ["\n".join(run).removesuffix("\r") for run in found if run]


@settings(max_examples=300, deadline=None)
@given(lines=LINES, part_bytes=st.integers(1, 80), newline=st.booleans())
def test_a_text_is_the_same_documents_however_it_is_cut(
    lines: list[str], part_bytes: int, newline: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes("\n".join(lines).encode() + b"\n" * newline)
    whole = lines if newline or (lines and lines[-1]) else lines[:-1]
    if not lines and newline:
        whole = [""]
    assert read(path, part_bytes) == expected(whole)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=30)), part_bytes=st.integers(1, 200), blank=st.booleans())
def test_lines_of_json_are_the_same_documents_however_they_are_cut(
    texts: list[str], part_bytes: int, blank: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_text(("\n\n" if blank else "\n").join(json.dumps({"text": text}) for text in texts))
    assert read(path, part_bytes) == texts


@pytest.mark.parametrize("part_bytes", [1, 300, 10**6])
def test_rows_of_parquet_are_the_same_documents_however_they_are_cut(tmp_path: Path, part_bytes: int) -> None:
    texts = [f"row {i} " * 10 for i in range(40)]
    table = pa.table({"body": pa.array([*texts, None]), "other": list(range(41))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    assert read(tmp_path / "rows.parquet", part_bytes, field="body") == texts


def test_a_long_document_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 50)
    text = "\n".join(["word " * 4] * 20) + "x" * 120
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "b.jsonl"):
        spans = [s for part in cut(resolve([Source(uri=str(tmp_path / name))]), 10**6) for s in part]
        found = [p for span in spans for p in pieces(span)]
        assert len(found) > 5
        assert assemble(spans) == [text]


def test_a_windows_file_is_separated_alike(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\nline\r\n<|endoftext|>\r\ntwo\r\n")
    assert read(tmp_path / "a.txt") == ["one\r\nline", "two"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\n\xff\xfe\n", "is not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2, at byte 17: is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1, at byte 0: has no text 'text'"),
        ("a.jsonl", b'{"Text": "x"}\n', "has no text 'text'; set field to 'Text'"),
        ("a.jsonl", b"[1]\n", "is not an object"),
        ("a.jsonl", b'{"text": 3}\n', "has no text 'text'"),
        ("a.jsonl", b'{"text": "\xff"}\n', "is not JSON"),
    ],
)
def test_what_is_no_text_is_told_with_its_place(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)


def test_a_column_of_numbers_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 1: has no text 'text' but int"):
        read(tmp_path / "a.parquet")


def write_pairs(path: Path, rows: list[dict[str, str]]) -> Path:
    """The same rows as .jsonl or .parquet."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_a_pair_is_one_document_of_two_halves(tmp_path: Path, name: str) -> None:
    path = write_pairs(tmp_path / name, [{"en": "a cat", "de": "eine Katze"}, {"en": "b", "de": "c"}])
    source = Source(uri=str(path), field=("en", "de"))
    spans = [span for part in cut(resolve([source]), 10**9) for span in part]
    found = [(piece.text, piece.halves, piece.ends) for span in spans for piece in pieces(span)]
    assert found == [
        ("a cat", True, False),
        ("eine Katze", False, True),
        ("b", True, False),
        ("c", False, True),
    ]


def test_pairs_in_a_text_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"cannot hold pairs or records; give them as \.jsonl"):
        resolve([Source(uri=str(tmp_path / "a.txt"), field=("en", "de"))])


def test_the_half_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", [{"en": "a cat"}])
    with pytest.raises(InputError, match="has no text 'de'"):
        list(pieces(cut(resolve([Source(uri=str(path), field=("en", "de"))]), 10**9)[0][0]))

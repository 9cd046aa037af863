"""Files as they come: each is read whole, or refused in one line that says which file and where in it."""

from __future__ import annotations

import errno
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thin import every

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.sources import lines, text_rows
from orchestrator.data.sources.documents import pieces


def texts(
    *paths: Path, field: str | tuple[str, str] = "text", part_bytes: int = 10**9, data_format: int = 2
) -> list[str]:
    """The documents of files, as a task reads them."""
    found, held = [], ""
    files = sources.resolve([Source(uri=str(path), field=field) for path in paths])
    for part in sources.cut(files, part_bytes):
        travelled = sources.from_json(sources.to_json(part, lines.LINE_BYTES))
        for piece in (piece for span in travelled for piece in pieces(span, data_format)):
            held += piece.text
            if piece.ends:
                found.append(held)
                held = ""
    return found


def parquet(path: Path, **columns: object) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=2)


READ: dict[str, tuple[str, bytes, list[str]]] = {
    "a mark of UTF-8": ("a.txt", b"\xef\xbb\xbfone\n<|endoftext|>\ntwo", ["one", "two"]),
    "a mark before JSON": ("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n', ["one"]),
    "a mark before a separator": ("a.txt", b"\xef\xbb\xbf<|endoftext|>\ntwo", ["two"]),
    "NUL": ("a.txt", b"one\x00two\n", ["one\x00two"]),
    "Windows' line ends": ("a.txt", b"one\r\n<|endoftext|>\r\ntwo\r\n", ["one", "two"]),
    "an empty file": ("a.txt", b"", []),
    "separators alone": ("a.txt", b"<|endoftext|>\n<|endoftext|>\n", []),
    "an empty document": ("a.jsonl", b'{"text": ""}\n{"text": "x"}\n', ["", "x"]),
    "blank lines": ("a.jsonl", b'\n\n{"text": "x"}\n  \n', ["x"]),
    "a name with all sorts": ("a [b]*? #%20ü {c}.txt", b"one", ["one"]),
    "other keys": ("a.jsonl", b'{"id": 3, "text": "x", "more": [1, {"a": null}]}', ["x"]),
    "a pair of surrogates": ("a.jsonl", b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
}  # fmt: skip
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "other bytes": ("a.txt", b"fine\nso far \xff\n", "line 2, at byte 12: is not UTF-8"),
    "another encoding": ("a.txt", "text".encode("utf-16"), "line 1, at byte 0: is not UTF-8"),
    "a compressed file": ("a.txt", gzip.compress(b"text"), "line 1, at byte 1: is not UTF-8"),
    "a compressed JSON": ("a.jsonl", gzip.compress(b"text"), "line 1, at byte 0: is not JSON"),
    "half a line": ("a.jsonl", b'{"text": "x"}\n{"text": "y', "line 2, at byte 14: is not JSON"),
    "a list": ("a.jsonl", b'[{"text": "x"}]', "line 1, at byte 0: is not an object"),
    "no field": ("a.jsonl", b'{"text": "x"}\n{"body": "x"}', "line 2, at byte 14: has no text 'text'"),
    "a number": ("a.jsonl", b'{"text": 3}', "line 1, at byte 0: has no text 'text'"),
    "null": ("a.jsonl", b'{"text": null}', "line 1, at byte 0: has no text 'text'"),
    "an unpaired surrogate": ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud800"}', "line 2, at byte 14: has an unpaired"),
    "a deep one": ("a.jsonl", b'{"text": ' + b"[" * 200_000, "line 1, at byte 0: is not JSON"),
    "other bytes in JSON": ("a.jsonl", b'{"text": "\xff"}', "line 1, at byte 0: is not JSON"),
    "no parquet": ("a.parquet", b"PAR1 or not", "is not a parquet file"),
    "an empty parquet": ("a.parquet", b"", "is not a parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_it_is_read(case: str, tmp_path: Path) -> None:
    name, data, expected = READ[case]
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path / name) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    name, data, message = REFUSED[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        texts(tmp_path / name)
    assert message in caught.value.what
    assert caught.value.where == str(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


def test_tables_with_holes_are_read_and_others_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "nulls.parquet", text=["a", None, "b", None])
    assert texts(tmp_path / "nulls.parquet") == ["a", "b"]
    parquet(tmp_path / "other.parquet", body=["a"])
    with pytest.raises(InputError, match="has no column 'text'; set field to one of body"):
        texts(tmp_path / "other.parquet")
    parquet(tmp_path / "long.parquet", text=["word " * 900] * 40)
    whole = (tmp_path / "long.parquet").read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1, 7):
        (tmp_path / "cut.parquet").write_bytes(whole[:cut])
        with pytest.raises(InputError, match="is not a parquet file"):
            texts(tmp_path / "cut.parquet")
    parquet(tmp_path / "none.parquet", text=pa.array([], pa.string()))
    assert texts(tmp_path / "none.parquet") == []


def test_folders_loops_and_nothing_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(InputError, match="is a folder without files"):
        texts(tmp_path / "x.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    for name in ("loop.txt", "gone.txt", "no*.txt", "missing.txt"):
        with pytest.raises(InputError):
            texts(tmp_path / name)
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(InputError, match=r"(gone|loop)\.txt"):
        texts(tmp_path / "*.txt")


def test_the_same_file_in_two_sources_is_read_for_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert texts(tmp_path / "a.txt", tmp_path / "a.txt") == ["one", "one"]


@pytest.mark.parametrize("kind", every(3, ["txt", "jsonl", "parquet"]))
def test_a_file_that_changes_after_it_was_identified_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    lines = [f"line {i} of many\n" for i in range(150_000)]
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), path)
    else:
        path.write_text("".join(lines if kind == "txt" else (json.dumps({"text": t}) + "\n" for t in lines)))
    (part,) = sources.cut(sources.resolve([Source(uri=str(path))]), 10**9)
    whole = path.read_bytes()
    with path.open("ab") as file:  # what is added later is not seen
        file.write(whole[:1000])
    grown = sum(piece.bytes for span in part for piece in pieces(span)) if kind != "parquet" else 0
    path.write_bytes(whole)
    assert grown in (0, sum(piece.bytes for span in part for piece in pieces(span)))
    for broken in (whole[: len(whole) // 2], whole[:-1], whole.replace(b"7", b"8"), whole[1:] + b"x"):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="has changed since this command began to read it") as caught:
            list(pieces(part[0]))
        assert caught.value.where == str(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(pieces(part[0]))


WORDS = st.lists(
    st.sampled_from(["a", "été", "longer words ", "x" * 70, "\n", " ", "  ", "😀", "<|endoftext|>"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(words=WORDS, part_bytes=st.integers(1, 120), longest=st.integers(8, 60))
def test_a_text_of_giant_lines_is_read_whole_however_it_is_cut(
    words: list[str], part_bytes: int, longest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "giant.txt"
    text = "start " + " ".join(words).replace("<|endoftext|>", "<|end")
    path.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "PIECE_BYTES", longest)
        files = sources.resolve([Source(uri=str(path))])
        found = [p for part in sources.cut(files, part_bytes) for span in part for p in pieces(span)]
    assert "".join(piece.text for piece in found) == text.removesuffix("\n").removesuffix("\r")
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(piece.bytes for piece in found) <= 2 * longest + 4


def test_a_line_of_twenty_megabytes_comes_in_bounded_pieces_over_all_parts(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(2000)]
    text = " ".join(rng.choices(words, k=600_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "a.jsonl"):
        parts = sources.cut(sources.resolve([Source(uri=str(tmp_path / name))]), 2**20)
        sizes = [[p.bytes for span in part for p in pieces(span)] for part in parts]
        assert sum(map(sum, sizes)) == len(text)
        assert max(max(part, default=0) for part in sizes) <= 2 * text_rows.PIECE_BYTES
        assert name == "a.jsonl" or min(map(sum, sizes)) > 2**19


def test_pieces_of_a_giant_line_are_tokenised_as_the_line_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By byte-level BPE: its words begin with the space before them, which is where the line is cut."""
    text = " ".join(f"word{i % 97}  two,  {i}" if i % 5 else f"w{i} x" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    trained = train_bytes([text], 400, ())
    encoder = tokenizer.encoder(trained)
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 500)
    found = [
        p.text
        for p in pieces(sources.cut(sources.resolve([Source(uri=str(tmp_path / "a.txt"))]), 10**9)[0][0])
    ]
    assert len(found) > 40
    whole = encoder.encode(text, add_special_tokens=False).ids
    assert [i for piece in found for i in encoder.encode(piece, add_special_tokens=False).ids] == whole


def test_a_line_of_json_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + json.dumps({"text": "y" * 2**21}) + "\n")
    with pytest.raises(InputError, match="line 2, at byte 14: is longer than 1 MiB"):
        texts(tmp_path / "a.jsonl")


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def refuse(path: str) -> tuple[int, str, str]:  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(sources.listing, "identify", refuse)
    with pytest.raises(
        InputError, match=r"a\.txt: cannot be read \(Permission denied\); check its permissions"
    ):
        texts(tmp_path / "a.txt")


@pytest.mark.parametrize("text", ['[{"text": "a"}]', '[\n{"text": "a"}\n]'])
def test_a_list_that_is_cut_is_told_as_one(text: str, tmp_path: Path) -> None:
    """One in a .json is not cut; see `test_json_rows.py`."""
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(text)
        assert texts(tmp_path / name, data_format=6) == ["a"]
    with pytest.raises(
        InputError, match=r"line 1, at byte 0: is not an object, and begins a list; .* or call the file .json"
    ):
        texts(tmp_path / "a.jsonl", part_bytes=5, data_format=6)

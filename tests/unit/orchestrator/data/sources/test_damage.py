"""Files that are damaged at random bytes, under each policy: nothing is lost without being counted, and nothing else is
raised than InputError."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import CASES, COMPRESS, FIELDS, KINDS, ROWS, TEXTS, read

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.sources import lines
from orchestrator.data.sources.documents import pieces
from orchestrator.data.sources.rejected import LEFT_OUT, Rejected
from orchestrator.data.sources.verified import VerifiedFile

CONTAINERS = ("tar", "parquet", "arrow", "feather")
CHECKED = [
    (kind, form)
    for kind, form in CASES
    if form in (".gz", ".bz2", ".xz") or (not form and kind in CONTAINERS)
]
"""Files that are whole or not: in a plain text a line may be missing, or two be one, and nobody can know."""
OTHERS = [(kind, form) for kind in ("txt", "jsonl", "csv", "tsv") for form in ("", ".zst")]


def damage(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A file that was damaged at a random byte, and how."""
    found, at = bytearray(data), rng.randrange(len(data))
    how = rng.choice(["flip", "cut", "delete", "insert", "zero"])
    size = rng.choice([1, 7, 100, 600])
    if how == "flip":
        for _ in range(rng.choice([1, 3])):
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del found[at:]
    elif how == "delete":
        del found[at : at + size]
    elif how == "insert":
        found[at:at] = rng.randbytes(size)
    else:
        found[at : at + size] = bytes(len(found[at : at + size]))
    return how, bytes(found)


def left_out(rejected: Rejected) -> int:
    return sum(finding["count"] for finding in rejected.to_json() if finding["action"] == LEFT_OUT)


def check(rng: random.Random, kind: str, form: str, path: Path) -> None:
    """One file, damaged once, under each policy and however it is cut into parts."""
    whole = COMPRESS[form](KINDS[kind](ROWS))
    how, data = damage(rng, whole)
    path.write_bytes(data)
    field, part_bytes = FIELDS.get(kind, "text"), rng.choice([150, 1000, 10**9])
    for on_error in ("skip", "repair"):
        once, again = Rejected(), Rejected()
        found = read(path, part_bytes, on_error, once, field=field)
        assert found == read(path, part_bytes, on_error, again, field=field)
        assert once.to_json() == again.to_json()
        if (kind, form) in CHECKED and data != whole:
            assert len(found) >= len(TEXTS) or left_out(once), (how, on_error)
        if how == "cut" and form and on_error == "skip":
            assert found == TEXTS[: len(found)]
    said = refusal(lambda: read(path, part_bytes, field=field))
    assert len(said.splitlines()) <= 1
    assert str(path) in said or not said
    if not said and (kind, form) in CHECKED and data != whole:
        assert len(read(path, part_bytes, field=field)) >= len(TEXTS)


def refusal(call: Callable[[], object]) -> str:
    """The line with which input is refused; empty if it is not."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_lose_nothing_without_a_word(seed: int, tmp_path: Path) -> None:
    _many(seed, 30, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_damaged_files_lose_nothing_without_a_word(seed: int, tmp_path: Path) -> None:
    _many(seed, 500, tmp_path)


def _many(seed: int, count: int, folder: Path) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        kind, form = rng.choice(CHECKED + OTHERS)
        check(rng, kind, form, folder / f"data.{kind}{form}")


Break = Callable[[bytes], bytes]
BROKEN: dict[str, tuple[Break, str, str]] = {
    "utf-8": (lambda line: line.replace(b"of", b"\xff\xfe"), "utf-8", "repaired"),
    "nul": (lambda line: line.replace(b"of", b"\\u0000"), "nul", "repaired"),
    "surrogate": (lambda line: line.replace(b"of", b"\\ud800"), "surrogate", "repaired"),
    "mark": (lambda line: line.replace(b'"text": "', b'"text": "\\ufeff'), "bom", "repaired"),
    "json": (lambda line: line[:-3], "json", "left out"),
    "no object": (lambda line: b"[1]", "json", "left out"),
    "field": (lambda line: line.replace(b'"text"', b'"body"'), "field", "left out"),
    "type": (lambda line: b'{"text": 3}', "type", "left out"),
    "long": (lambda line: b'{"text": "' + b"x" * 3000 + b'"}', "long", "left out"),
}  # fmt: skip


@pytest.mark.parametrize("part_bytes", [200, 10**9])
@pytest.mark.parametrize("form", ["", ".gz"])
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_counted_exactly(
    case: str, form: str, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 1000)
    change, kind, action = BROKEN[case]
    wrong = sorted(random.Random(case).sample(range(len(ROWS)), 7))
    plain = KINDS["jsonl"](ROWS).splitlines()
    data = b"\n".join(change(line) if n in wrong else line for n, line in enumerate(plain)) + b"\n"
    path = tmp_path / f"a.jsonl{form}"
    path.write_bytes(COMPRESS[form](data))
    right = [text for n, text in enumerate(TEXTS) if n not in wrong]
    for on_error in ("skip", "repair"):
        rejected = Rejected()
        found = read(path, part_bytes, on_error, rejected)
        told = [(f["kind"], f["action"], f["count"]) for f in rejected.to_json()]
        if kind == "bom" and on_error == "skip":  # it harms nobody
            assert told == []
            assert len(found) == len(TEXTS)
        elif on_error == "repair" and action == "repaired":
            assert told == [(kind, "repaired", 7)]
            assert len(found) == len(TEXTS)
            assert not any(bad in text for text in found for bad in ("\0", "\ud800", "\ufeff"))
        else:
            assert told == [(kind, "left out", 7)]
            assert found == right
        for finding in rejected.to_json():
            assert [place["byte"] for place in finding["examples"]] == [
                sum(len(line) + 1 for line in data.split(b"\n")[:n]) for n in wrong[:3]
            ]


def test_pieces_of_a_text_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    parts = [b"one", b"tw\xff", b"thr\x00ee", b"four", b"\xff\xfet\x00e\x00x\x00t\x00"]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n<|endoftext|>\n".join(parts))
    rejected = Rejected()
    assert read(path, 10**9, "skip", rejected) == ["one", "four"]
    assert {f["kind"]: f["count"] for f in rejected.to_json()} == {"utf-8": 2, "nul": 1}
    rejected = Rejected()
    assert read(path, 10**9, "repair", rejected) == ["one", "tw\ufffd", "three", "four"]
    assert {(f["kind"], f["action"]) for f in rejected.to_json()} == {
        ("utf-8", "repaired"), ("nul", "repaired"), ("binary", "left out")
    }  # fmt: skip


@pytest.mark.parametrize("on_error", ["skip", "repair"])
@pytest.mark.parametrize("part_bytes", [40, 100, 10**9])
def test_a_document_over_many_parts_stays_apart_from_the_next(
    part_bytes: int, on_error: str, tmp_path: Path
) -> None:
    """Where one of its parts is left out, its end is not."""
    body = [b"line %d of the text\n" % n for n in range(20)]
    for wrong in range(len(body)):
        broken = [b"\xff" * 19 + b"\n" if n == wrong else line for n, line in enumerate(body)]
        (tmp_path / "a.txt").write_bytes(
            b"first\n<|endoftext|>\n" + b"".join(broken) + b"<|endoftext|>\nlast"
        )
        rejected = Rejected()
        found = read(tmp_path / "a.txt", part_bytes, on_error, rejected)
        assert found[0] == "first"
        assert found[-1] == "last"
        assert len(found) <= 3
        assert sum(f["count"] for f in rejected.to_json()) == 1


def test_a_giant_line_is_passed_over_whole_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 2**20)
    path = tmp_path / "a.jsonl"
    giant = '{"text": "' + "x" * 2**23 + '"}'
    path.write_text(f'{{"text": "a"}}\n{giant}\n{{"text": "b"}}\n')
    for part_bytes in (2**20, 10**9):
        files = sources.resolve([Source(uri=str(path))], on_error="skip")
        rejected, found = Rejected(), []
        for part in sources.cut(files, part_bytes):
            for span in sources.from_json(sources.to_json(part, 2**20)):
                found += [piece.text for piece in pieces(span, rejected=rejected)]
        assert found == ["a", "b"]
        assert [(f["kind"], f["count"]) for f in rejected.to_json()] == [("long", 1)]


def test_a_wrong_line_far_in_a_large_file_is_told_with_its_number(tmp_path: Path) -> None:
    """A task has the checksums of its own blocks alone, and counts the lines before them all the same."""
    lines_of = [json.dumps({"text": "x" * 1000}) for _ in range(5000)]
    lines_of[4800] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines_of))
    with pytest.raises(InputError, match=r"line 4801, at byte [0-9]+: is not JSON"):
        read(tmp_path / "a.jsonl", 2**20)


def test_what_storage_fails_to_give_is_not_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of storage is raised as it is under every policy, also out of a parser that takes such for damage."""
    for kind, form in CHECKED + OTHERS:
        path = tmp_path / f"a.{kind}{form}"
        path.write_bytes(COMPRESS[form](KINDS[kind](ROWS)))
        files = sources.resolve([Source(uri=str(path), field=FIELDS.get(kind, "text"))], on_error="skip")
        parts = sources.cut(files, 10**9)

        def fail(self: VerifiedFile, buffer: memoryview) -> int:
            raise TimeoutError("the store does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(VerifiedFile, "readinto", fail)
            with pytest.raises(TimeoutError):
                [piece for part in parts for span in part for piece in pieces(span, rejected=Rejected())]
            with pytest.raises(TimeoutError):
                sources.cut(files, 10**9) if kind in ("parquet", "arrow", "feather") else fail(None, None)


def test_a_stray_quote_takes_one_line_and_not_the_file(tmp_path: Path) -> None:
    rows_of = [f'"row {n}",x' for n in range(50)]
    rows_of[20] = '"row 20,x'
    (tmp_path / "a.csv").write_text("text,other\n" + "\n".join(rows_of) + "\n")
    rejected = Rejected()
    assert read(tmp_path / "a.csv", 10**9, "skip", rejected) == [f"row {n}" for n in range(50) if n != 20]
    assert left_out(rejected) == 1


def test_a_damaged_member_of_an_archive_costs_its_row(tmp_path: Path) -> None:
    data = bytearray(KINDS["tar"](ROWS))
    header = data.index(b"0010.txt")
    data[header : header + 8] = b"\xff" * 8
    (tmp_path / "a.tar").write_bytes(bytes(data))
    rejected = Rejected()
    found = read(tmp_path / "a.tar", 10**9, "skip", rejected, field="txt")
    assert found == [text for n, text in enumerate(TEXTS) if n != 10]
    assert {f["kind"]: f["count"] for f in rejected.to_json()} == {"damaged": 1, "field": 1}


def test_rows_of_a_damaged_group_are_counted_by_number(tmp_path: Path) -> None:
    """With page checksums the damage is noticed, and the group's size is known."""
    table = pa.Table.from_pylist([{"text": text * 50} for text in TEXTS])
    pq.write_table(
        table, tmp_path / "a.parquet", row_group_size=8, compression="snappy", use_dictionary=False
    )
    meta = pq.read_metadata(tmp_path / "a.parquet").row_group(2).column(0)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    begin = meta.data_page_offset
    data[begin + 10 : begin + 40] = b"\xff" * 30
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    rejected = Rejected()
    found = read(tmp_path / "a.parquet", 10**9, "skip", rejected)
    assert found == [text * 50 for n, text in enumerate(TEXTS) if n // 8 != 2]
    assert [(f["kind"], f["count"], f["examples"][0]["row"]) for f in rejected.to_json()] == [
        ("damaged", 8, 16)
    ]

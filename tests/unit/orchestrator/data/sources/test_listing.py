from __future__ import annotations

import gzip
import os
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.prepare.fingerprint import fingerprint
from orchestrator.data.sources import SourceFile, cut, resolve
from orchestrator.data.sources.documents import pieces
from orchestrator.data.sources.kinds import kind_of
from orchestrator.data.sources.rejected import Rejected


def files(folder: Path, **texts: str) -> str:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return str(folder / "*.txt")


def test_files_come_by_source_and_by_name(tmp_path: Path) -> None:
    glob = files(tmp_path, b="bb", a="a", c="ccc")
    found = resolve([Source(uri=str(tmp_path / "c.txt")), Source(uri=glob)])
    assert [(f.source, Path(f.uri).name, f.size) for f in found] == [
        (0, "c.txt", 3),
        (1, "a.txt", 1),
        (1, "b.txt", 2),
        (1, "c.txt", 3),
    ]


def test_content_not_time_or_place_identifies_a_file(tmp_path: Path) -> None:
    files(tmp_path, a="same", b="same", c="else")
    os.utime(tmp_path / "b.txt", (1, 1))
    a, b, c = (file.content for file in resolve([Source(uri=str(tmp_path / "*.txt"))]))
    assert a == b != c


def test_a_file_on_another_file_system_is_identified_by_its_tag() -> None:
    place = f"memory://{uuid.uuid4().hex}"
    with fsspec.open(f"{place}/a.txt", "w") as file:
        file.write("hello")
    (before,) = resolve([Source(uri=f"{place}/*.txt")])
    with fsspec.open(before.uri) as file:
        assert len(file.read()) == before.size == 5
    with fsspec.open(f"{place}/a.txt", "w") as file:
        file.write("hallo")
    (after,) = resolve([Source(uri=f"{place}/*.txt")])
    assert before.content != after.content


def test_a_signature_is_no_part_of_the_name_that_says_what_a_file_holds() -> None:
    place = f"memory://{uuid.uuid4().hex}/a.jsonl?sig=b/c"
    with fsspec.open(place, "w") as file:
        file.write('{"text": "hello"}')
    (found,) = resolve([Source(uri=place)])
    assert found.kind == ".jsonl"


def test_a_name_with_brackets_is_a_name_first(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert [f.uri for f in resolve([Source(uri=str(tmp_path / "a[1].txt"))])] == [str(tmp_path / "a[1].txt")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "there is no such file"),
        ("none*.jsonl", "there is no such file"),
        ("", r"is a folder of rows \(r.jsonl\) and of texts \(a.txt\); name its files"),
        ("empty", "is a folder without files"),
        ("*.pdf", r"b.pdf holds no text that can be read"),
        ("b.pdf", r"b.pdf holds no text that can be read"),
        ("c.parquet.gz", r"c.parquet.gz holds no text that can be read"),
    ],
)
def test_a_source_that_names_no_text_is_told(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    for other in ("b.pdf", "r.jsonl", "c.parquet.gz"):
        (tmp_path / other).write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message) as caught:
        resolve([Source(uri=str(tmp_path / "a.txt")), Source(uri=f"{tmp_path}/{name}")])
    assert str(caught.value).startswith("data.sources.1.uri")


def test_an_unknown_protocol_is_told() -> None:
    with pytest.raises(InputError, match="cannot be listed"):
        resolve([Source(uri="nowhere://bucket/a.txt")])


def test_large_files_are_cut_and_small_ones_of_one_source_put_together(tmp_path: Path) -> None:
    glob = files(tmp_path, a="x" * 250, b="y" * 30, c="z" * 30, d="", e="w" * 50)
    parts = cut(resolve([Source(uri=glob), Source(uri=glob)]), 100)
    shape = [[(Path(s.file.uri).stem, s.start, s.stop) for s in part] for part in parts]
    one = [[("a", 0, 83)], [("a", 83, 166)], [("a", 166, 250)], [("b", 0, 30), ("c", 0, 30)], [("e", 0, 50)]]
    assert shape == one + one
    assert [part[0].file.source for part in parts] == [0] * 5 + [1] * 5


@pytest.mark.parametrize(("total", "expected"), [(0, 2**20), (2**28, 2**22), (2**40, 2**25)])
def test_parts_grow_with_the_text_within_bounds(total: int, expected: int) -> None:
    half = SourceFile(source=0, uri="", kind=".txt", size=total // 2, content="", field="")
    assert sources.part_size([half, half]) == expected


def test_row_groups_of_parquet_are_spans(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["word " * 50] * 90}), tmp_path / "a.parquet", row_group_size=10)
    found = resolve([Source(uri=str(tmp_path / "a.parquet"))])
    spans = [s for part in cut(found, 1) for s in part]
    assert [(s.start, s.stop) for s in spans] == [(i, i + 1) for i in range(9)]
    (whole,) = cut(found, 10**9)
    assert [(s.start, s.stop) for s in whole] == [(0, 9)]


def test_a_parquet_file_without_the_field_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="has no column 'text'; set field to one of body, id"):
        cut(resolve([Source(uri=str(tmp_path / "a.parquet"))]), 100)


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match="is not a parquet file"):
        cut(resolve([Source(uri=str(tmp_path / "a.parquet"))]), 100)


def test_a_part_travels_as_text(tmp_path: Path) -> None:
    (part,) = cut(resolve([Source(uri=files(tmp_path, a="x" * 20, b="é"))]), 100)
    found = sources.from_json(sources.to_json(part, reach=10))
    assert [span.sums for span in found] == [span.file.sums for span in part]
    assert [replace(span, sums="", file=replace(span.file, sums="")) for span in found] == [
        replace(span, file=replace(span.file, sums="")) for span in part
    ]


def names(*places: str, on_error: str = "fail", **keys: object) -> list[str]:
    uri = places[0] if len(places) == 1 else list(places)
    return [Path(file.uri).name for file in resolve([Source(uri=uri, **keys)], on_error=on_error)]


def test_folders_globs_and_lists_name_files(tmp_path: Path) -> None:
    for name in ("b/c/3.txt", "b/2.md", "a/1", "b/.hidden", "b/_SUCCESS", ".git/config", "b/4.txt.gz"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("x")
    data = tmp_path / "data"
    assert names(str(data)) == ["1", "2.md", "4.txt.gz", "3.txt"]
    assert names(f"{data}/**/*.txt") == ["3.txt"]
    assert names(f"{data}/*/*.txt*", f"{data}/b/2.md") == ["4.txt.gz", "2.md"]
    (tmp_path / "files.list").write_text(f"# texts\ndata/b/2.md\n\n{data}/a/1\ndata/**/3.*\n")
    assert names(str(tmp_path / "files.list")) == ["2.md", "1", "3.txt"]


def test_a_file_that_is_named_twice_is_told(tmp_path: Path) -> None:
    glob = files(tmp_path, a="x", b="y")
    with pytest.raises(InputError, match=r"names .*a.txt twice; name it once"):
        names(glob, str(tmp_path / "a.txt"))


def test_a_list_is_told_what_is_wrong_with_it(tmp_path: Path) -> None:
    for text, said in (
        ("", "a list without names"),
        ("gone.txt", "names .*gone.txt, but there is no such file"),
    ):
        (tmp_path / "a.list").write_text(text)
        with pytest.raises(InputError, match=said):
            names(str(tmp_path / "a.list"))
    with pytest.raises(InputError, match="there is no such file"):
        names(str(tmp_path / "none.list"))


def test_a_file_of_a_list_that_is_gone_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "files.list").write_text("gone.jsonl\na.jsonl\n")
    found = resolve([Source(uri=str(tmp_path / "files.list"))], on_error="skip")
    (part,) = cut(found, 10**9)
    rejected = Rejected()
    texts = [piece.text for span in part for piece in pieces(span, rejected=rejected)]
    assert texts == ["x"]
    assert [(f["file"], f["kind"], f["count"]) for f in rejected.to_json()] == [
        (str(tmp_path / "gone.jsonl"), "vanished", 1)
    ]


def test_what_a_file_holds_may_be_said(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text('{"text": "x"}\n')
    for form, kind in (("jsonl", ".jsonl"), ("text", ".txt"), (None, ".txt")):
        (file,) = resolve([Source(uri=str(tmp_path / "part-0"), format=form)])
        assert (file.kind, file.compression) == (kind, "")
    assert kind_of("a.tgz", None) == (".tar", "gz")
    assert kind_of("a.JSONL.GZ", None) == (".jsonl", "gz")
    assert kind_of("a.zst", None) == (".txt", "zst")
    assert kind_of("a.zst", "csv") == (".csv", "zst")
    assert kind_of("a.arrow.gz", None) is None


def test_compressed_objects_and_lists_are_read_from_other_file_systems() -> None:
    place = f"memory://{uuid.uuid4().hex}"
    for name, data in (
        ("a/1.jsonl.gz", gzip.compress(b'{"text": "x"}\n')),
        ("a/b/2.jsonl", b'{"text": "y"}'),
    ):
        with fsspec.open(f"{place}/{name}", "wb") as file:
            file.write(data)
    with fsspec.open(f"{place}/all.list", "w") as file:
        file.write(f"{place}/a/b/2.jsonl\na/1.jsonl.gz\n")
    for name, expected in (("a", ["x", "y"]), ("**/*.jsonl*", ["x", "y"]), ("all.list", ["y", "x"])):
        for on_error in ("fail", "skip"):
            (part,) = cut(resolve([Source(uri=f"{place}/{name}")], on_error=on_error), 10**9)
            assert [piece.text for span in part for piece in pieces(span, rejected=Rejected())] == expected


def test_the_policy_is_part_of_the_fingerprint_only_if_set(tmp_path: Path) -> None:
    glob = files(tmp_path, a="x")
    found = {
        on_error: fingerprint(resolve([Source(uri=glob)], on_error=on_error), ["x", {}], 300)
        for on_error in ("fail", "skip", "repair")
    }
    assert len(set(found.values())) == 3
    assert found["fail"] == fingerprint(resolve([Source(uri=glob)]), ["x", {}], 300)


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    """As in the caches of hubs, whose files are links; a glob and a folder refused them, and a name did not."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "f00").write_text("one")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").symlink_to("../blobs/f00")
    for place in (data, data / "*.txt", data / "a.txt"):
        assert names(str(place)) == ["a.txt"]
    (data / "b.txt").symlink_to("a.txt")
    with pytest.raises(InputError, match=r"names .*/data/b\.txt twice, by a link; name it once"):
        names(str(data / "*.txt"))
    (data / "b.txt").unlink()
    (data / "b.txt").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"data/b\.txt is not a file"):
        names(str(data))


def test_a_wildcard_matches_nothing_hidden(tmp_path: Path) -> None:
    """What an editor has kept of a file was trained on beside it."""
    for name in ("a.txt", "._a.txt", ".kept/a.txt", "b/.a.txt", "b/c.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("x")
    data = tmp_path / "data"
    assert names(str(data / "**" / "*.txt")) == ["a.txt", "c.txt"]
    assert names(str(data / ".kept" / "*.txt")) == ["a.txt"]
    assert names(str(data / "b" / ".*.txt")) == [".a.txt"]
    assert names(str(data / "._a.txt")) == ["._a.txt"]

"""All kinds of files, by whatever they are compressed, give the same rows."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from raw_files import CASES, COMPRESS, FIELDS, KINDS, ROWS, TEXTS, jsonl, read, tar, text
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.prepare import fingerprint, shards
from orchestrator.data.prepare.records import RecordKind, records_of
from orchestrator.data.sources.documents import pieces
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.sources.rows import rows
from orchestrator.data.store.data_folder import DataFolder


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_all_kinds_and_compressions_have_the_same_documents(kind: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}{form}"
    path.write_bytes(COMPRESS[form](KINDS[kind](ROWS)))
    for part_bytes in (150, 10**9):
        for on_error in ("fail", "skip", "repair"):
            rejected = Rejected()
            field = FIELDS.get(kind, "text")
            assert read(path, part_bytes, on_error, rejected, field=field) == TEXTS
            assert rejected.to_json() == []


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "tar", "parquet", "arrow"])
def test_all_kinds_of_rows_serve_pairs_and_records(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    path.write_bytes(KINDS[kind](ROWS))
    body, label = ("txt", "cls") if kind == "tar" else ("text", "label")
    (part,) = sources.cut(sources.resolve([Source(uri=str(path), field=(body, label))]), 10**9)
    found = [(piece.text, piece.halves) for piece in pieces(part[0])]
    assert found == [pair for row in ROWS for pair in ((row["text"], True), (row["label"], False))]
    encoder = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    field = {"text": body, "label": label}
    (part,) = sources.cut(sources.resolve([Source(uri=str(path), field=field)]), 10**9)
    kind_of = RecordKind("sequence_classification", ("bad", "good"))
    records = [json.loads(record.text) for record in records_of(part[0], kind_of, encoder, 0)]
    assert records == [{"text": row["text"], "label": row["label"]} for row in ROWS]


@pytest.mark.parametrize("kind", ["jsonl", "tar", "parquet", "arrow"])
def test_paths_enter_rows_and_templates_join_columns(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    path.write_bytes(KINDS[kind](ROWS))
    before = "json." if kind == "tar" else ""
    titles = [f"title {i}" for i in range(len(ROWS))]
    assert read(path, field=f"{before}more.title[0]") == titles
    joined = [f"{{{title}}}\n\n{body}" for title, body in zip(titles, TEXTS, strict=True)]
    assert read(path, field=f"{{{{{{{before}more.title[0]}}}}}}\n\n{{{before}text}}") == joined


def test_a_column_whose_name_is_a_path_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a.b": "column", "a": {"b": "path"}}\n{"a": {"b": "path"}}\n')
    assert read(tmp_path / "a.jsonl", field="a.b") == ["column", "path"]


@pytest.mark.parametrize(
    "field", ["{}", "{a!r}", "{a:>9}", "{a.b[x]}", "{", "{{a}}", "{a.__class__}()"[:-2] + "!s}"]
)
def test_templates_are_of_columns_alone(field: str) -> None:
    with pytest.raises(ValueError):
        Source(uri="a.jsonl", field=field)


def test_a_template_enters_no_attributes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n')
    with pytest.raises(InputError, match="has no text"):
        read(tmp_path / "a.jsonl", field="{a.__class__}")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt.gz", gzip.compress(text(ROWS))[:-9], "is cut off"),
        ("a.txt.gz", b"plain text", r"is damaged \(it does not begin as .gz does\)"),
        ("a.jsonl.zst", gzip.compress(b"x"), r"it does not begin as .zst does"),
        ("a.jsonl.gz", b"", "is cut off"),
        ("a.csv", b'text\n"one"x\n', "line 2, at byte 5: is not a row of CSV"),
        ("a.csv", b"text\none,two\n", "line 2, at byte 5: has 2 values, and there are 1 columns"),
        ("a.csv", b"text,text\nno,text\n", "line 1, at byte 0: has several columns called .text."),
        ("a.csv", b"text\n\xff\n", "line 2, at byte 5: is not UTF-8"),
        ("a.tar", tar(ROWS)[:3000], "is cut off: the end of the archive is missing"),
        ("a.tar", b"", "is cut off"),
        ("a.tar", tar(ROWS).replace(b"0000.txt", b"0000.doc", 1), "is damaged"),
    ],
)
def test_what_is_damaged_is_told_in_one_line(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / name, field="txt" if ".tar" in name else "text")
    assert caught.value.where == str(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    assert "or set data.on_error" in str(caught.value)


def test_streams_one_after_another_are_one_text(tmp_path: Path) -> None:
    for form, compress in list(COMPRESS.items())[1:]:
        path = tmp_path / f"a.txt{form}"
        path.write_bytes(compress(b"one\n<|endoftext|>\n") + compress(b"") + compress(b"two"))
        assert read(path) == ["one", "two"]


def test_a_row_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    (part,) = sources.cut(sources.resolve([Source(uri=str(tmp_path / "a.jsonl"))]), 10**9)
    data = (tmp_path / "a.jsonl").read_bytes()
    found = list(rows(part[0]))
    assert (
        [json.loads(data[row.at :].split(b"\n")[0]) for row in found] == ROWS == [row.values for row in found]
    )


def test_old_data_has_its_old_fingerprint_and_its_old_bytes(tmp_path: Path) -> None:
    """Both as the version before has written them, in each format."""
    texts = [f"line {i} of text, été\n" * (i % 5 + 1) for i in range(60)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(texts))
    (tmp_path / "b.txt").write_text("\ufeffone\r\n<|endoftext|>\r\ntwo \x00 three", newline="")
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"text": x, "n": i}) + "\n" for i, x in enumerate(texts))
    )
    quoted = 'label,text\nbad,"a ""quoted"", text\nof two lines"\ngood,plain\n'
    (tmp_path / "d.csv").write_text(quoted)
    of_text = [Source(uri=str(tmp_path / name)) for name in ("*.txt", "c.jsonl")]
    of_rows = [Source(uri=str(tmp_path / "d.csv"), field={"text": "text", "label": "label"})]
    names = [
        "374cd4a7fa72d3d3bda96979d1f7d4aa",
        "aaf512dc15adfc28d856da8f11216822",
        "39f5bdba8e963fe163f4062a2df66a85",
    ]
    content = "31f09ebd633fd863f1f2f39717b0af33889e615130194c4fe6e257e61482e986"
    assert _made(of_text, None, tmp_path / "texts") == (names, content)
    names = [
        "236e62117cc68b990fe1e7ecba716529",
        "3bc6a35f7afcd3e57606e5c1fa13d48d",
        "16befe162e866723028705c7a3d061fd",
    ]
    content = "60abd2cf4e6d63b37ff52b8723c014d386c1a5edfacd7ed1b59c48b2a559a894"
    kind = RecordKind("sequence_classification", ("bad", "good"))
    assert _made(of_rows, kind, tmp_path / "rows") == (names, content)


def _made(named: list[Source], kind: RecordKind | None, folder: Path) -> tuple[list[str], str]:
    """The fingerprints of sources in all formats, and a hash of all that is written of them."""
    encoder = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, "line": 1, "of": 2, "text": 3, "?": 4}, unk_token="?")
    )
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    files, whole = sources.resolve(named), hashlib.sha256()
    prepared = DataFolder(str(folder))
    prepared.write("tokenizer.json", encoder.to_str().encode())
    for data_format in (1, 2, 3) if kind is None else (3,):
        for number, part in enumerate(sources.cut(files, 300)):
            travelled = sources.from_json(sources.to_json(part, None if data_format == 1 else 2**26))
            shards.make_shard(
                prepared.uri, number, travelled, shards.TokenFormat(5, {"eos": 0}, data_format, kind)
            )()
            name = shards.shard_name(number)
            for written in (name, shards.ends_name(name), shards.contents_name(name)):
                whole.update(prepared.read(written) or b"")
    names = [fingerprint.fingerprint(files, ["x", {}], 300, form, kind) for form in (1, 2, 3)]
    return names, whole.hexdigest()
